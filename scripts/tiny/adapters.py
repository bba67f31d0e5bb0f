"""Train the adapters that ship with the tiny models: `python -m scripts.tiny.adapters --models DIR --output DIR`.

Without --only all are trained, one at a time on each GPU and each by a process of its own. One is a variant of the tiny
world and nothing else, learned by the captured step of `trainer` with `pairs.PairMasters`; the rate falls with the
share of the minutes that is over, and what there is then (or at SIGTERM) is saved.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from scripts.tiny.bins import Capacity
from scripts.tiny.feed import Feed, Source
from scripts.tiny.kept import Kept
from scripts.tiny.models import NAMES, Family
from scripts.tiny.muon import MuonSettings
from scripts.tiny.pairs import PairMasters, weights_of
from scripts.tiny.train import rate_at
from scripts.tiny.trainer import Outcome, WholeTrainer
from spyglass.checkpoint.layout import Spelling
from spyglass.config.read import read_model_config
from spyglass.config.shipped import SHIPPED
from spyglass.errors import DeviceError, SpyglassError
from spyglass.lora.peft import read_adapter
from spyglass.lora.write import write_adapter
from spyglass.model import find_device
from spyglass.params.declared import AdapterGroup
from spyglass.params.targets import describe_counts
from spyglass.tiny_world.words import Variant
from spyglass.train.loss import IGNORED

CAPACITY = Capacity(bins=16, length=512, patches=39424, cells=4928, images=128, largest_image=1800, targets=2048)
KEPT_STEPS = 200
LOG_EVERY = 20
_PATIENCE = 120  # seconds until there must be a step
_LOOK_EVERY = 0.2  # seconds, for whether a process has ended
SETTINGS = MuonSettings(other_rate=1.0)  # pairs are no matrices to orthogonalise: Adam


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """An adapter: its folder's name, the model, what it learns, where, and how it is spelled.

    `rate` is Adam's peak; `minutes` on one H200 are for the whole call, start included.
    """

    name: str
    family: Family
    variant: Variant
    targets: tuple[AdapterGroup, ...]
    rank: int
    minutes: float
    rate: float = 3e-3
    spelling: Spelling = "native"

    @property
    def key(self) -> str:
        """What `--only` names."""
        return f"{self.family}-{self.name}"

    @property
    def place(self) -> Path:
        """Its folder below that of all models."""
        return Path(NAMES[self.family], "adapters", self.name)


# Ranks about as large as 1 MB allows (bf16); experts in Transformers' names carry zeros where matrices share a stack.
# The slow ones come first, so that several GPUs end at about the same time.
RECIPES = {
    recipe.key: recipe
    for recipe in (
        Recipe(
            name="french",
            family="v4",
            variant="french",
            targets=("shared", "experts"),
            rank=8,
            minutes=5.5,
            spelling="hf",
        ),
        Recipe(name="roman", family="v4", variant="roman", targets=("attention", "experts"), rank=6, minutes=5.0),
        Recipe(name="roman", family="v41", variant="roman", targets=("attention", "experts"), rank=6, minutes=5.0),
        Recipe(name="negative", family="v4", variant="negative", targets=("tower", "aligner"), rank=24, minutes=2.0),
        Recipe(name="negative", family="v41", variant="negative", targets=("tower", "aligner"), rank=24, minutes=2.0),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How adapters are trained. `minutes` of a whole call, start included; `workers` make the cases of one adapter.

    `start`: where adapters lie that learning goes on from, as `output` lays them; None = fresh ones.
    """

    models: Path
    output: Path
    device: str
    minutes: float
    workers: int
    seed: int
    compiled: bool
    start: Path | None = None
    capacity: Capacity = CAPACITY


class AdapterRun:
    """One adapter being trained."""

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe, self.options, self.begun = recipe, options, time.perf_counter()
        self.stop_asked = False
        folder = options.models / NAMES[recipe.family]
        self.config = read_model_config(folder)
        source = partial(Source, folder=folder, capacity=options.capacity, variant=recipe.variant)
        self.feed = Feed(source=source(seed=options.seed), processes=options.workers, slots=3 * options.workers)
        self.held_out = Feed(source=source(split="test", seed=1), processes=1, slots=4)
        self.feed.start()
        self.held_out.start()
        endings = (signal.SIGTERM, signal.SIGINT)
        self._handlers = {ending: signal.signal(ending, self._ask_to_stop) for ending in endings}
        if torch.device(options.device).index is not None:
            torch.cuda.set_device(options.device)  # streams and graphs are those of the current one
        torch._dynamo.config.recompile_limit = 64  # one function, many shapes: each is compiled once
        torch.backends.cuda.matmul.allow_tf32 = True
        masters = partial(
            PairMasters, targets=recipe.targets, rank=recipe.rank, alpha=2.0 * recipe.rank, seed=options.seed
        )
        self.trainer = WholeTrainer(
            self.config,
            options.capacity,
            weights_of(folder, self.config),
            device=options.device,
            settings=SETTINGS,
            compiled=options.compiled,
            masters=masters,
        )
        if options.start is not None:
            assert isinstance(self.trainer.masters, PairMasters)
            self.trainer.masters.begin_with(read_adapter(options.start / recipe.place))
        self.kept = Kept(torch.device(options.device), KEPT_STEPS)
        self.log = options.output / f"{recipe.key}.csv"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.unlink(missing_ok=True)
        self._say(f"{self.trainer.masters.num_values():,} trained numbers")

    def _ask_to_stop(self, number: int, frame: object) -> None:
        self.stop_asked = True

    def _say(self, text: str) -> None:
        print(f"{self.recipe.key} {time.perf_counter() - self.begun:.0f} s: {text}", flush=True)

    def learn(self) -> int:
        """Until the minutes are over; how many steps."""
        trainer, end = self.trainer, self.begun + 60 * self.options.minutes
        place, _ = self._next(random.Random(0))
        graphed = self.options.device.startswith("cuda")
        if graphed:
            trainer.capture(self.kept.steps[place])
            self._say("captured")
        take_step = trainer.replay if graphed else trainer.step
        sums, marks = torch.zeros(5, device=trainer.optimiser.rate.device), deque[Any]()
        source, step, fresh_count, started = random.Random(self.options.seed), 0, 0, time.perf_counter()
        while not self.stop_asked and (now := time.perf_counter()) < end:
            share = rate_at((now - started) / (end - started))
            trainer.optimiser.rate.fill_(self.recipe.rate * share)
            sums += _numbers(take_step(self.kept.steps[place]))
            self.kept.used(place)
            step += 1
            if graphed:
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 3:
                    marks.popleft().synchronize()
            if step % LOG_EVERY == 0:
                self._write_log(step, sums, fresh_count, self.recipe.rate * share)
                sums.zero_()
                fresh_count = 0
            place, fresh = self._next(source)
            fresh_count += fresh
        if step % LOG_EVERY:
            self._write_log(step, sums, fresh_count, 0.0)
        return step

    def _next(self, source: random.Random) -> tuple[int, bool]:
        """A step on the device, and whether it is a fresh one."""
        timeout, latest = 0.0, time.perf_counter() + _PATIENCE
        while time.perf_counter() < latest:
            found = self.feed.take(timeout)
            if found is not None:
                place = self.kept.add(self.feed.tensors(found[0]))
                self.feed.give_back(found[0])
                return place, True
            repeated = self.kept.repeat(source)
            if repeated is not None:
                return repeated, False
            timeout = 1.0
        raise SystemExit(f"no step was made in {_PATIENCE} seconds")

    def _write_log(self, step: int, sums: torch.Tensor, fresh: int, rate: float) -> None:
        loss, count, right, norm, steps = sums.tolist()
        row = {
            "step": step,
            "seconds": round(time.perf_counter() - self.begun, 2),
            "loss": round(loss / count, 5),
            "right": round(right / count, 5),
            "norm": round(norm / steps, 4),
            "rate": f"{rate:.3e}",
            "fresh": fresh,
        }
        new = not self.log.exists()
        with self.log.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, row)
            if new:
                writer.writeheader()
            writer.writerow(row)
        if step % (10 * LOG_EVERY) == 0:
            self._say(" ".join(f"{name} {value}" for name, value in row.items()))
        if not math.isfinite(loss):
            raise SystemExit("the loss is not finite")

    @torch.no_grad()
    def report(self) -> None:
        """Share of held-out cases whose whole answer is the likeliest at every token, by kind."""
        right, total = Counter[str](), Counter[str]()
        device = self.trainer.optimiser.rate.device
        for _ in range(self.held_out.slots):
            found = self.held_out.take(60.0)
            if found is None:
                break
            tensors = {name: tensor.to(device) for name, tensor in self.held_out.tensors(found[0]).items()}
            predicted, targets = self.trainer.logits(tensors).argmax(dim=1), tensors["targets_R"].long()
            cases = set(tensors["sample_R"][(predicted != targets) & (targets != IGNORED)].tolist())
            total.update(found[2])
            right.update(kind for number, kind in enumerate(found[2]) if number not in cases)
        shares = " ".join(f"{kind} {100 * right[kind] / total[kind]:.0f}" for kind in sorted(total))
        self._say(f"{100 * right.total() / max(total.total(), 1):.1f} % of {total.total()} held out | {shares}")

    def save(self) -> None:
        """The adapter's folder."""
        masters = self.trainer.masters
        assert isinstance(masters, PairMasters)
        adapter, place = masters.adapter(), self.options.output / self.recipe.place
        write_adapter(
            place,
            adapter,
            names=self.recipe.spelling,
            base_model=NAMES[self.recipe.family],
            num_experts=self.config.text.n_routed_experts,
        )
        size = sum(path.stat().st_size for path in place.iterdir())
        self._say(f"{place}: {size:,} bytes, {describe_counts(adapter.counts())}")

    def end(self) -> None:
        """Stop the other processes."""
        self.feed.stop()
        self.held_out.stop()
        for ending, handler in self._handlers.items():
            signal.signal(ending, handler)


def _numbers(outcome: Outcome) -> torch.Tensor:
    """Summed loss, targets, right ones, gradient norm, and 1 for the step."""
    parts = outcome.loss, outcome.count, outcome.right, outcome.norm, torch.ones_like(outcome.loss)
    return torch.stack([part.float() for part in parts])


def train_one(recipe: Recipe, options: Options) -> int:
    """Train and save; the number of steps."""
    run = AdapterRun(recipe, options)
    try:
        steps = run.learn()
        run.save()
        run.report()
    finally:
        run.end()
    return steps


def train_all(keys: Sequence[str], options: Mapping[str, Any]) -> int:
    """One process an adapter, on every GPU one after another. The number that failed."""
    gpus = torch.cuda.device_count() if options["device"] == "cuda" else 0
    free = [f"cuda:{number}" for number in range(gpus)] or [options["device"]]
    waiting, running, failed = deque(keys), dict[str, subprocess.Popen[bytes]](), 0

    def stop(*_: object) -> None:
        waiting.clear()
        for process in running.values():
            process.terminate()

    handlers = {ending: signal.signal(ending, stop) for ending in (signal.SIGTERM, signal.SIGINT)}
    while waiting or running:
        while waiting and free:
            device = free.pop(0)
            running[device] = subprocess.Popen(command_of(waiting.popleft(), dict(options) | {"device": device}))
        time.sleep(_LOOK_EVERY)
        for device, process in list(running.items()):
            if process.poll() is not None:
                failed += running.pop(device).returncode != 0
                free.append(device)
    for ending, handler in handlers.items():
        signal.signal(ending, handler)
    return failed


def command_of(key: str, options: dict[str, Any]) -> list[str]:
    """The command that trains one."""
    flags = ["--compile"] * options.pop("compiled")
    flags += [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [sys.executable, "-m", "scripts.tiny.adapters", "--only", key, *flags]


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=SHIPPED, help="where the models' folders lie")
    parser.add_argument(
        "--output", type=Path, required=True, help="adapters go to DIR/MODEL/adapters/NAME, logs to DIR"
    )
    parser.add_argument("--start", type=Path, help="go on from the adapters that lie there, as --output lays them")
    parser.add_argument("--only", choices=RECIPES, action="append", help="one of them; may be repeated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, help="of each, start included (default: what its recipe says)")
    parser.add_argument("--workers", type=int, help="processes that make cases, for each adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile",
        dest="compiled",
        action="store_true",
        help="fuse small ops: minutes to begin with, then twice as fast",
    )
    given = vars(parser.parse_args(arguments))
    keys = given.pop("only") or list(RECIPES)
    at_once = min(len(keys), max(1, torch.cuda.device_count()))
    given["workers"] = given["workers"] or max(1, (os.cpu_count() or 2) // at_once - 2)
    try:
        find_device(given["device"])
    except DeviceError as error:
        raise SystemExit(f"{error}; --device cpu is possible, for trials") from None
    if len(keys) == 1:
        recipe = RECIPES[keys[0]]
        minutes = recipe.minutes if given["minutes"] is None else given["minutes"]
        try:
            train_one(recipe, Options(**given | {"minutes": minutes}))
        except SpyglassError as error:
            raise SystemExit(str(error)) from None
    elif failed := train_all(keys, given):
        raise SystemExit(f"{failed} of {len(keys)} adapters failed")


if __name__ == "__main__":
    main()
