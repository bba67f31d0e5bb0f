"""How the shipped adapters are made: the captured step trains pairs and nothing else; what it saves is what serves."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from scripts.tiny import adapters
from scripts.tiny.adapters import RECIPES, Options, Recipe, train_all, train_one
from scripts.tiny.bins import Capacity, Filling, lay_out
from scripts.tiny.feed import Source, learner_of, make_step
from scripts.tiny.models import NAMES
from scripts.tiny.muon import MuonSettings
from scripts.tiny.pairs import PairMasters, weights_of
from scripts.tiny.trainer import WholeTrainer
from spyglass import LLM, SamplingParams
from spyglass.config.read import read_model_config
from spyglass.config.shipped import SHIPPED
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.errors import AdapterError
from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.peft import read_adapter
from spyglass.lora.pool import AdapterPool
from spyglass.lora.write import write_adapter
from spyglass.model import load_model
from spyglass.params.targets import GROUPS, UNTRAINABLE, count_groups
from spyglass.tiny_world.cases import make_case
from spyglass.train.loss import step_logits
from spyglass.train.packing import pack
from tests.tolerance import assert_law

SMALL = Capacity(bins=1, length=256, patches=1800, cells=256, images=4, largest_image=1800, targets=64)


def trainer_of(
    recipe: Recipe, capacity: Capacity = SMALL, targets: tuple[str, ...] | None = None, seed: int = 0
) -> WholeTrainer:
    """fp32 and plain numerics, as the laws are compared."""
    folder = SHIPPED / NAMES[recipe.family]
    config = read_model_config(folder)
    masters = partial(
        PairMasters, targets=targets or recipe.targets, rank=recipe.rank, alpha=2.0 * recipe.rank, seed=seed
    )
    return WholeTrainer(
        config,
        capacity,
        weights_of(folder, config),
        dtype=torch.float32,
        numerics="plain",
        settings=MuonSettings(other_rate=1.0),
        masters=masters,
    )


def masters_of(trainer: WholeTrainer) -> PairMasters:
    assert isinstance(trainer.masters, PairMasters)
    return trainer.masters


def shake(trainer: WholeTrainer) -> None:
    """Pairs that do something."""
    source = torch.Generator().manual_seed(5)
    for stack in trainer.masters.stacks:
        stack.value.add_(0.02 * torch.randn(stack.value.shape, generator=source))


def moved(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-3 * b.abs().max())


@pytest.mark.parametrize("key", ["v4-roman", "v41-negative"])
def test_what_is_saved_serves_what_was_trained(key: str, tmp_path: Path) -> None:
    recipe = RECIPES[key]
    folder = SHIPPED / NAMES[recipe.family]
    trainer = trainer_of(recipe, targets=tuple(group for group in GROUPS if group not in UNTRAINABLE))
    samples = [learner_of(folder).sample(make_case(3, 0, kinds=("count",), variant="roman").dialogue())]
    filling = Filling(capacity=SMALL)
    assert filling.add(samples[0])
    store = None if trainer.config.text.engram is None else open_engram(folder, trainer.config)
    arrays = lay_out(filling, trainer.config, None if store is None else store.classes_V)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    loaded = load_model(folder, dtype="float32", numerics="plain", progress=False)
    engram = None if store is None else EngramFeed(store, device=loaded.device, dtype=torch.float32)
    rows = len(samples[0].rows)
    with torch.no_grad():
        before = trainer.logits(tensors)[:rows]
        step = pack(samples, loaded.config, dtype=torch.float32, engram=engram)
        assert_law(before, step_logits(loaded.model, step), "fresh pairs change nothing")
        shake(trainer)
        after = trainer.logits(tensors)[:rows]
        write_adapter(tmp_path, masters_of(trainer).adapter())
        use = AdapterPool(loaded.model).attach("it", read_adapter(tmp_path))
        step = pack(samples, loaded.config, dtype=torch.float32, adapter_id=use.adapter_id, engram=engram)
        assert moved(after, before)
        assert_law(after, step_logits(loaded.model, step), "the saved adapter")


def test_a_fresh_pair_begins_as_peft_does_another_with_every_seed() -> None:
    first, second = (masters_of(trainer_of(RECIPES["v4-negative"], seed=seed)) for seed in (1, 2))
    for base, a, b, other in zip(first.bases, first.stacks[::2], first.stacks[1::2], second.stacks[::2], strict=True):
        bound = base.value.shape[-1] ** -0.5
        assert 0.9 * bound < a.value.abs().max() <= bound and not b.value.any()
        assert not torch.equal(a.value, other.value)


@pytest.mark.parametrize("key", ["v4-french", "v41-negative"])
def test_learning_goes_on_from_what_was_saved(key: str, tmp_path: Path) -> None:
    """In either spelling and with any alpha; one of them stacks experts, whose pairs come apart again."""
    recipe = RECIPES[key]
    first, second = (trainer_of(recipe, seed=seed) for seed in (1, 2))
    shake(first)
    saved = {name: replace(pair, alpha=0.5 * pair.alpha) for name, pair in masters_of(first).adapter().modules.items()}
    experts = first.config.text.n_routed_experts
    write_adapter(tmp_path, AdapterFile(modules=saved), names=recipe.spelling, base_model="a", num_experts=experts)
    masters_of(second).begin_with(read_adapter(tmp_path))
    for number, (mine, theirs) in enumerate(zip(masters_of(first).stacks, masters_of(second).stacks, strict=True)):
        assert_law(theirs.value, (0.5 if number % 2 else 1.0) * mine.value.bfloat16().float(), mine.names[0])


def test_learning_does_not_go_on_from_an_adapter_of_other_modules_or_rank() -> None:
    roman, negative = (masters_of(trainer_of(RECIPES[key])) for key in ("v4-roman", "v4-negative"))
    with pytest.raises(AdapterError, match=r"other modules than this one, \w+.* among them"):
        roman.begin_with(negative.adapter())
    larger = masters_of(trainer_of(replace(RECIPES["v4-negative"], rank=25)))
    for stack in larger.stacks:
        stack.value.fill_(0.01)
    with pytest.raises(AdapterError, match="has rank 25, this one 24"):
        negative.begin_with(larger.adapter())


@pytest.mark.slow
def test_a_run_that_cannot_begin_says_why_and_ends(tmp_path: Path) -> None:
    """Its makers of steps run by then; an interpreter that ends would wait for them."""
    call = [sys.executable, "-m", "scripts.tiny.adapters", "--only", "v4-negative", "--device", "cpu", "--workers", "1"]
    call += ["--start", str(tmp_path / "nowhere"), "--output", str(tmp_path)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "there is no such folder" in done.stderr and "Traceback" not in done.stderr


def test_a_step_trains_the_pairs_and_nothing_else() -> None:
    recipe = RECIPES["v4-negative"]
    trainer = trainer_of(recipe)
    masters = masters_of(trainer)
    source = Source(folder=SHIPPED / NAMES["v4"], capacity=SMALL, variant="negative")
    arrays, kinds = make_step(source, learner_of(source.folder), 0)
    assert set(kinds) <= {"colour", "shape"}, "cases of the variant"
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    frozen = [base.value.clone() for base in masters.bases]
    biases = {name: value.clone() for name, value in masters.fixed.items()}
    pairs = [stack.value.clone() for stack in masters.stacks]
    trainer.optimiser.rate.fill_(2e-3)
    losses = [float(trainer.step(tensors).loss) for _ in range(4)]
    assert losses[3] < losses[0]
    assert all(not torch.equal(stack.value, old) for stack, old in zip(masters.stacks, pairs, strict=True))
    assert all(torch.equal(base.value, old) for base, old in zip(masters.bases, frozen, strict=True))
    assert all(torch.equal(masters.fixed[name], old) for name, old in biases.items()), "routing stays what it is"


@pytest.mark.parametrize("key", RECIPES)
def test_an_adapter_has_the_groups_of_its_recipe_and_fits_in_a_megabyte(key: str, tmp_path: Path) -> None:
    recipe = RECIPES[key]
    trainer = trainer_of(recipe)
    shake(trainer)
    adapter, text = masters_of(trainer).adapter(), trainer.config.text
    write_adapter(tmp_path, adapter, names=recipe.spelling, base_model="a", num_experts=text.n_routed_experts)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1_000_000
    found = read_adapter(tmp_path)
    slots = [slot.name for slot in trainer.model.slots() if slot.kind == "matrix"]
    expected = {group: count for group, count in count_groups(slots).items() if group in recipe.targets}
    assert found.counts() == adapter.counts() == expected
    for name, pair in adapter.modules.items():
        theirs = found.modules[name]
        assert_law(
            theirs.scale * theirs.b_OR.float() @ theirs.a_RI.float(), pair.scale * pair.b_OR.float() @ pair.a_RI.float()
        )


@pytest.mark.slow
def test_a_short_run_leaves_an_adapter_that_a_model_loads_and_a_log(tmp_path: Path) -> None:
    recipe = RECIPES["v4-roman"]
    options = Options(
        models=SHIPPED, output=tmp_path, device="cpu", minutes=0.15, workers=1, seed=0, compiled=False, capacity=SMALL
    )
    assert train_one(recipe, options) >= 1
    llm = LLM(NAMES["v4"], device="cpu", adapters={"roman": str(tmp_path / recipe.place)})
    assert set(llm.adapter_counts("roman")) == set(recipe.targets)
    answers = llm.generate([[0, 5, 6]] * 2, SamplingParams(max_tokens=2), adapter=[None, "roman"])
    assert len(answers) == 2
    with (tmp_path / "v4-roman.csv").open(newline="", encoding="utf-8") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)]


def test_adapters_are_trained_one_at_a_time_on_a_device_and_failures_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"

    def call(key: str, options: dict[str, object]) -> list[str]:
        said = f"open({str(log)!r}, 'a').write(__import__('sys').argv[1] + '\\n')"
        return [
            sys.executable,
            "-c",
            f"{said}; {said}; raise SystemExit({key == 'b'})",
            f"{key} on {options['device']}",
        ]

    monkeypatch.setattr(adapters, "command_of", call)
    assert train_all(["a", "b", "c"], {"device": "cpu"}) == 1
    assert log.read_text().split("\n") == [*[f"{key} on cpu" for key in "aabbcc"], ""]
