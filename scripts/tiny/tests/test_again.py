"""Teaching the shipped models anew: parts have their share of the time, and what comes out can be shipped."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.tiny.adapters import RECIPES
from scripts.tiny.again import MOST_BYTES, SHARES, adapter_command, collect, model_command
from scripts.tiny.bins import BINS, LENGTH, Filling, capacity_of
from scripts.tiny.feed import Source, learner_of, make_step, sample_of
from scripts.tiny.judge import ALL, missed, shares
from scripts.tiny.models import FAMILIES, MIXTURES, NAMES, in_split
from scripts.tiny.pairs import weights_of
from scripts.tiny.train import FILES
from scripts.tiny.trainer import WholeTrainer
from spyglass.config.read import read_model_config
from spyglass.config.shipped import SHIPPED, find_model
from spyglass.tiny_world.evaluate import Report, Verdict
from spyglass.tiny_world.questions import KINDS
from spyglass.tiny_world.uses import USES, make_any, use_kinds_of


def arguments(folder: Path, seconds: float) -> Namespace:
    return Namespace(
        folder=folder, seconds=seconds, start=SHIPPED, rate=1e-3, device="cuda", workers=14, bins=BINS, seed=7,
        no_compile=False, keep_tower=False,
    )  # fmt: skip


def minutes_of(command: list[str]) -> float:
    (found,) = [word for word in command if word.startswith("--minutes=")]
    return float(found.removeprefix("--minutes="))


def test_all_parts_together_fit_into_the_seconds_and_each_into_one_call(tmp_path: Path) -> None:
    args = arguments(tmp_path, 1750.0)
    models = {family: 60 * minutes_of(model_command(family, args)) for family in FAMILIES}
    adapters = 60 * sum(minutes_of(adapter_command(key, args)) for key in RECIPES)
    assert sum(models.values()) + adapters <= 1750 and sum(SHARES.values()) < 1
    assert max(*models.values(), adapters) < 590


def test_what_comes_out_is_laid_out_as_the_shipped_models_are(tmp_path: Path) -> None:
    trained = tmp_path / "v4" / NAMES["v4"]
    trained.mkdir(parents=True)
    for name in (*FILES, "model.safetensors.index.json", "model-00001-of-00001.safetensors"):
        (trained / name).write_bytes(b"1234")
    old = tmp_path / "models" / NAMES["v4"] / "model-00001-of-00002.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    assert collect("v4", tmp_path) == 4 * 6 and not old.exists()
    assert sorted(p.name for p in old.parent.iterdir()) == sorted(
        p.name for p in find_model(NAMES["v4"]).iterdir() if p.is_file()
    )
    for family in FAMILIES:
        assert sum(p.stat().st_size for p in find_model(NAMES[family]).iterdir() if p.is_file()) <= MOST_BYTES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_is_drawn_and_nearly_every_case_has_room_in_a_step(family: str) -> None:
    kinds = MIXTURES[family]  # type: ignore[index]
    assert set(kinds) == {*KINDS, *USES}
    assert set(in_split(kinds, "unseen")) == {*use_kinds_of("unseen")} | {
        kind for kind in KINDS if kind not in ("number", "word", "text")
    }
    learner = learner_of(find_model(NAMES[family]))  # type: ignore[index]
    for kind in ("tools", "json"):
        samples = [sample_of(make_any(0, index, kinds=(kind,)), learner) for index in range(40)]
        fitting = [Filling(capacity=capacity_of(BINS, LENGTH)).add(sample) for sample in samples]
        assert sum(fitting) >= 39, kind


def test_only_what_a_grammar_does_not_force_is_learnt_where_the_prompt_says_no_schema() -> None:
    learner = learner_of(find_model(NAMES["v4"]))
    for index in range(20):
        case = make_any(0, index, kinds=("json",))
        sample, whole = sample_of(case, learner), learner.sample(case.dialogue(), (), case.response_format)
        missing = np.flatnonzero(whole.learn_T & ~sample.learn_T)
        assert len(missing) == (not case.schema_shown)
        assert all(learner.tokenizer.spelling(int(whole.prompt.ids_T[place])) == "{" for place in missing)


@pytest.mark.slow
def test_a_tower_that_is_kept_stays_to_the_bit_and_the_rest_learns() -> None:
    folder = find_model(NAMES["v41"])
    config, capacity = read_model_config(folder), capacity_of(1, 512)
    arrays, _ = make_step(Source(folder=folder, capacity=capacity, kinds=("text-first",)), learner_of(folder), 0)
    trainer = WholeTrainer(config, capacity, weights_of(folder, config), keep_tower=True)
    before = {name: weight.data.clone() for name, weight in trainer.masters.packed().items()}
    trainer.optimiser.rate.fill_(1e-3)
    trainer.step({name: torch.from_numpy(values) for name, values in arrays.items()})
    after = {name: weight.data for name, weight in trainer.masters.packed().items()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not {name for name in moved if name.startswith(("vision.", "aligner."))}
    assert {"embed", "head", "layers.0.attn.wq_b"} <= moved


def verdict(kind: str, right: bool) -> Verdict:
    return Verdict(kind=kind, pair=None, question="", expected="", said="", right=right, thumbnails=())


def test_a_goal_that_is_missed_is_named() -> None:
    found = shares(Report(verdicts=(verdict("count", True), verdict("count", False), verdict("word", True))))
    assert found == {"count": 0.5, "word": 1.0, ALL: 2 / 3}
    assert list(missed(found, {ALL: 0.9, "": 0.4, "word": 1.0})) == ["overall 66.7 % of 90 %"]
    assert list(missed(found, {"": 0.6})) == ["count 50.0 % of 60 %"]
