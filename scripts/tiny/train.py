"""Train a tiny model on one GPU: `python -m scripts.tiny.train v4 --folder runs/v4 --minutes 8.5`.

Cases are made by other processes while the GPU learns; a step that was made is kept on the GPU and used a few
times when no fresh one is there (`kept`). The learning rate depends on the share of the planned time that is over,
so a run may be cut into calls: state is saved at the end of each (SIGTERM or Ctrl-C ends one too), and the next goes
on from it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import shutil
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from scripts.tiny.bins import BINS, LENGTH, Capacity, capacity_of
from scripts.tiny.feed import Feed, Source
from scripts.tiny.kept import Kept
from scripts.tiny.models import FAMILIES, MIXTURES, NAMES, Family, in_split, initial_value, tiny_config
from scripts.tiny.pairs import weights_of
from scripts.tiny.tokenizer import PLACEHOLDER, VOCAB_SIZE, build_tokenizer, write_tokenizer
from scripts.tiny.trainer import Outcome, WholeTrainer, unchosen
from scripts.tiny.untaught import set_apart
from spyglass.checkpoint.save import SaveItem, save_checkpoint
from spyglass.config.read import read_model_config
from spyglass.engram import classes_of_tokenizer
from spyglass.errors import CheckpointError, DeviceError
from spyglass.model import find_device
from spyglass.quant.codec import decode, encode
from spyglass.tiny_world.cases import Split
from spyglass.tiny_world.corpus import all_texts
from spyglass.train.loss import IGNORED
from spyglass.train.state import State, load_state, save_state

KEPT_STEPS = 600
PEAK_RATE, WARM_UP, BALANCE, PLACES = 3.5e-3, 0.02, 1e-3, 0.1
LOG_EVERY, REPORT_EVERY = 50, 4000  # steps; of a CPU, which is slow, a tenth
TELL_EVERY = 15.0  # seconds between lines of progress
END = 20.0  # seconds of a call that are kept for saving and the last report
HELD_OUT: Mapping[Split, int] = {"test": 6, "unseen": 3}  # steps of each split that are asked
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a call runs. `minutes` of this call from its start to its end, `horizon` seconds of learning of all calls
    together (None = what this call has left once it learns), `rate` at most.

    `start`: folder of a model whose weights are where learning begins, None = drawn. `keep_tower`: tower and aligner
    stay as they are. `kinds` are drawn from, None = as the family's mixture has them.
    """

    family: Family
    folder: Path
    minutes: float
    horizon: float | None
    rate: float
    start: Path | None
    seed: int
    workers: int
    device: str
    compiled: bool
    capacity: Capacity
    keep_tower: bool = False
    kinds: tuple[str, ...] | None = None


def prepare(folder: Path, family: Family, start: Path | None = None) -> None:
    """config.json, generation_config.json and tokenizer files, if they are not there; of `start` if that is given."""
    if (folder / "config.json").exists():
        return
    if start is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copy(start / name, folder / name)
        return
    tokenizer = build_tokenizer(all_texts(), family)
    write_tokenizer(tokenizer, folder)
    classes = int(classes_of_tokenizer(tokenizer, VOCAB_SIZE).max()) + 1
    placeholder = tokenizer.token_to_id(PLACEHOLDER)
    assert placeholder is not None
    config = tiny_config(family, VOCAB_SIZE, image_token_id=placeholder, classes=classes)
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def rate_at(progress: float) -> float:
    """Share of the peak rate when `progress` (0 to 1) of the learning is over: rise, hold, linear fall to 0."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return max(0.0, min(1.0, (1 - progress) / 0.6))


def facts_of(state: State | None, options: Options) -> dict[str, Any]:
    """Seconds learnt, steps drawn and token ids taught up to a state; None = a run that begins.

    Raises:
        CheckpointError: the state does not say all of it. Which tokens were taught cannot be seen in the weights, and
            without it the head's rows of taught tokens would be moved as if they never had been.
    """
    facts = {"elapsed": 0.0, "drawn": 0, "taught": []}
    if state is None:
        return facts
    missing = [name for name in facts if name not in state.facts]
    if missing:
        raise CheckpointError(
            f"the state in {options.folder} was saved by an earlier version and does not say {', '.join(missing)}, so "
            "this run cannot go on; begin one in another --folder, from the weights of this one with "
            f"--start {options.folder / NAMES[options.family]}"
        )
    return dict(state.facts)


class Run:
    """One call of the script."""

    def __init__(self, options: Options) -> None:
        self.options, self.begun = options, time.perf_counter()
        self.model_folder = options.folder / NAMES[options.family]
        state = load_state(options.folder / "state")
        facts = facts_of(state, options)
        prepare(self.model_folder, options.family, options.start)
        self.elapsed, self.step_number = float(facts["elapsed"]), 0 if state is None else state.step
        self.feeds = self._start_feeds(int(facts["drawn"]))
        place = torch.device(options.device)
        torch._dynamo.config.recompile_limit = 64  # one function, many shapes: each is compiled once
        torch.backends.cuda.matmul.allow_tf32 = True
        config = read_model_config(self.model_folder)
        self.taught_V = torch.zeros(config.text.vocab_size, dtype=torch.bool)
        self.taught_V[facts["taught"]] = True
        drawn = partial(initial_value, seed=options.seed)
        self.trainer = WholeTrainer(
            unchosen(config, options.capacity),
            options.capacity,
            drawn if options.start is None else weights_of(options.start, config),
            device=options.device,
            compiled=options.compiled,
            keep_tower=options.keep_tower,
        )
        print(f"{self.trainer.masters.num_values():,} trained numbers", flush=True)
        if state is not None:
            self.trainer.restore(state.tensors)
        self.kept = Kept(place, KEPT_STEPS)
        self.log, self._told = options.folder / "log.csv", 0.0
        self._log_every = LOG_EVERY if place.type == "cuda" else max(1, LOG_EVERY // 10)
        self.stop_asked = False
        self._held: dict[str, list[tuple[dict[str, torch.Tensor], list[str]]]] = {split: [] for split in HELD_OUT}
        for ending in (signal.SIGTERM, signal.SIGINT):
            signal.signal(ending, self._ask_to_stop)

    def _ask_to_stop(self, number: int, frame: object) -> None:
        self.stop_asked = True

    def _start_feeds(self, drawn: int) -> dict[str, Feed]:
        options = self.options
        source = partial(Source, folder=self.model_folder, capacity=options.capacity)
        kinds = MIXTURES[options.family] if options.kinds is None else options.kinds
        feeds: dict[str, Feed] = {
            "train": Feed(
                source=source(seed=options.seed, kinds=kinds),
                processes=options.workers,
                slots=4 * options.workers,
                first=drawn,
            ),
            **{
                split: Feed(source=source(split=split, seed=1, kinds=in_split(kinds, split)), processes=1, slots=slots)
                for split, slots in HELD_OUT.items()
            },
        }
        for feed in feeds.values():
            feed.start()
        return feeds

    def learn(self) -> None:
        """Until the call's minutes or the horizon are over."""
        options, trainer = self.options, self.trainer
        first = self._fresh(timeout=120.0)
        assert first is not None, "no step was made in two minutes"
        if options.start is not None and self.step_number == 0:
            self.report()  # what the weights to begin with can do
        graphed = options.device.startswith("cuda")
        if graphed:
            trainer.capture(self.kept.steps[first])
            print(f"captured after {time.perf_counter() - self.begun:.1f} s", flush=True)
        take_step = trainer.replay if graphed else trainer.step
        sums, marks = torch.zeros(6, device=trainer.optimiser.rate.device), deque[Any]()
        source, fresh_count, begun = random.Random(self.step_number), 0, time.perf_counter()
        before, place, last = self.elapsed, first, self.begun + 60 * options.minutes - END
        horizon = before + max(last - begun, 1.0) if options.horizon is None else options.horizon
        while not self.stop_asked and time.perf_counter() < last:
            self.elapsed = before + time.perf_counter() - begun
            if self.elapsed >= horizon:
                break
            place, fresh = self._next(source)
            fresh_count += fresh
            share = rate_at(self.elapsed / horizon)
            trainer.optimiser.rate.fill_(options.rate * share)
            trainer.balance_rate.fill_(BALANCE * share)
            trainer.place_rate.fill_(PLACES * share)
            outcome = take_step(self.kept.steps[place])
            self.kept.used(place)
            sums += _numbers(outcome)
            self.step_number += 1
            if graphed:
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 3:
                    marks.popleft().synchronize()
            if self.step_number % self._log_every == 0:
                self._write_log(sums, fresh_count, options.rate * share)
                sums.zero_()
                fresh_count = 0
            if self.step_number % REPORT_EVERY == 0:
                self.report(1)
                self.save()
        self.elapsed = before + time.perf_counter() - begun

    def _next(self, source: random.Random) -> tuple[int, bool]:
        while True:
            place = self._fresh(timeout=0.0)
            if place is not None:
                return place, True
            repeated = self.kept.repeat(source)
            if repeated is not None:
                return repeated, False
            place = self._fresh(timeout=1.0)
            if place is not None:
                return place, True

    def _fresh(self, timeout: float) -> int | None:
        feed = self.feeds["train"]
        found = feed.take(timeout)
        if found is None:
            return None
        slot, _, _ = found
        tensors = feed.tensors(slot)
        targets_R = tensors["targets_R"].long()
        self.taught_V[targets_R[targets_R != IGNORED]] = True
        place = self.kept.add(tensors)
        feed.give_back(slot)
        return place

    def _write_log(self, sums: torch.Tensor, fresh: int, rate: float) -> None:
        loss, count, right, places, norm, uneven = sums.tolist()
        row = {
            "step": self.step_number,
            "seconds": round(self.elapsed, 2),
            "loss": round(loss / count, 5),
            "right": round(right / count, 5),
            "places": round(places / self._log_every, 4),
            "norm": round(norm / self._log_every, 4),
            "imbalance": round(uneven / self._log_every, 3),
            "rate": f"{rate:.3e}",
            "fresh": fresh,
            "targets": int(count),
        }
        seconds = time.perf_counter() - self.begun
        new = not self.log.exists()
        with self.log.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            if new:
                writer.writeheader()
            writer.writerow(row)
        if seconds - self._told >= TELL_EVERY:
            self._told = seconds
            told = " ".join(f"{name} {value}" for name, value in row.items())
            print(f"{told} | {seconds:.0f} of {60 * self.options.minutes:.0f} s", flush=True)
        if not math.isfinite(loss):
            raise SystemExit("the loss is not finite")

    @torch.no_grad()
    def report(self, most: int = 100) -> None:
        """Share of held-out cases whose whole answer is the likeliest at every token, by kind."""
        for split in HELD_OUT:
            feed, right, total = self.feeds[split], Counter[str](), Counter[str]()
            steps = self._held_out(feed, split)[:most]
            for tensors, kinds in steps:
                predicted = self.trainer.logits(tensors).argmax(dim=1)
                targets = tensors["targets_R"].long()
                wrong = (predicted != targets) & (targets != IGNORED)
                cases = set(tensors["sample_R"][wrong].tolist())
                total.update(kinds)
                right.update(kind for number, kind in enumerate(kinds) if number not in cases)
            shares = " ".join(f"{kind} {100 * right[kind] / total[kind]:.0f}" for kind in sorted(total))
            overall = 100 * right.total() / max(total.total(), 1)
            print(f"  step {self.step_number} {split}: {overall:.1f} % of {total.total()} | {shares}", flush=True)

    def _held_out(self, feed: Feed, split: str) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
        device = self.trainer.optimiser.rate.device
        while len(self._held[split]) < feed.slots and (found := feed.take(60.0)) is not None:
            slot, _, kinds = found
            tensors = {name: tensor.to(device) for name, tensor in feed.tensors(slot).items()}
            self._held[split].append((tensors, kinds))
        return self._held[split]

    def save(self) -> None:
        """The state, and the packed checkpoint."""
        folder, trainer = self.options.folder, self.trainer
        taught = self.taught_V.nonzero()[:, 0].tolist()
        facts = {"elapsed": self.elapsed, "drawn": self.feeds["train"].drawn, "taught": taught}
        tensors = {name: tensor.detach().cpu() for name, tensor in trainer.state_tensors().items()}
        save_state(folder / "state", State(step=self.step_number, tensors=tensors, facts=facts))
        write_checkpoint(trainer, self.model_folder, self.taught_V)

    def end(self) -> None:
        """Stop the other processes."""
        for feed in self.feeds.values():
            feed.stop()


def _numbers(outcome: Outcome) -> torch.Tensor:
    parts = (outcome.loss, outcome.count, outcome.right, outcome.places, outcome.norm, outcome.imbalance)
    return torch.stack([part.float() for part in parts])


def write_checkpoint(trainer: WholeTrainer, folder: Path, taught_V: torch.Tensor) -> None:
    """The weights of the masters, packed; config and tokenizer are there."""
    packed = trainer.masters.packed()
    head = packed["head"]
    packed["head"] = encode(set_apart(decode(head, torch.float32), taught_V), head.format)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    items = [
        SaveItem(name, trainer.masters.specs[name], weight.format, partial(lambda value: value, weight))
        for name, weight in packed.items()
    ]
    save_checkpoint(folder, items)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=14.8, help="of this call")
    parser.add_argument(
        "--horizon",
        type=float,
        help="seconds of learning of all calls together (default: what the minutes leave behind the start)",
    )
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest learning rate")
    parser.add_argument("--start", type=Path, help="begin with the weights of this model instead of drawn ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bins", type=int, default=BINS, help="size of a step; 1 for a trial on a CPU")
    parser.add_argument("--length", type=int, default=LENGTH, help="of a bin; 512 leaves questions with tools out")
    parser.add_argument("--kinds", help="what is drawn, names with commas, repeated ones more often")
    parser.add_argument(
        "--keep-tower", action="store_true", help="do not train what sees: half the work, for a trial on a CPU"
    )
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument("--copy-to", type=Path, help="copy state, log and checkpoint here at the end, flat")
    given = vars(parser.parse_args(arguments))
    copy_to, capacity = given.pop("copy_to"), capacity_of(given.pop("bins"), given.pop("length"))
    given["kinds"] = given["kinds"] and tuple(given["kinds"].split(","))
    try:
        find_device(given["device"])
    except DeviceError as error:
        raise SystemExit(f"{error}; the captured step needs a GPU with about 60 GB free") from None
    try:
        run = Run(Options(**given, capacity=capacity))
    except CheckpointError as error:
        raise SystemExit(str(error)) from None
    try:
        run.learn()
        run.save()
        run.report()
    finally:
        run.end()
    if copy_to is not None:
        for path in (run.log, *(run.options.folder / "state").glob("*/*"), *run.model_folder.glob("*.safetensors")):
            shutil.copy(path, copy_to / path.name)


if __name__ == "__main__":
    main()
