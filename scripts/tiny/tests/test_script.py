"""How the shipped models are made: their tokenizer says any text, their steps are made alike in any process."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts.tiny import train
from scripts.tiny.bins import Capacity
from scripts.tiny.feed import Feed, Source, learner_of, make_step
from scripts.tiny.kept import MOST_USES, Kept
from scripts.tiny.models import FAMILIES, NAMES, Family, tiny_config
from scripts.tiny.tokenizer import POINTING, VOCAB_SIZE
from scripts.tiny.train import Options, rate_at
from spyglass.config import parse_model_config
from spyglass.config.shipped import find_model
from spyglass.params.table import param_table
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.tiny_world.cases import make_case
from spyglass.train.state import State, save_state

CAPACITY = Capacity(bins=2, length=512, patches=4096, cells=512, images=16, largest_image=1800, targets=256)


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    found = load_tokenizer(find_model("spyglass-tiny-v4"))
    assert found is not None
    return found


@given(text=st.text(max_size=40))
def test_any_text_comes_back_from_its_tokens(tokenizer: PromptTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_answers_point_with_tokens_of_their_own_and_digits_stand_alone(tokenizer: PromptTokenizer) -> None:
    learner = learner_of(find_model("spyglass-tiny-v4"))
    case = make_case(0, 0, kinds=("grounding",))
    said = [tokenizer.spelling(int(token)) for token in learner.sample(case.dialogue()).targets]
    assert {"<｜ref｜>", "<｜/ref｜>", "<｜box｜>", "<｜/box｜>"} <= set(said) and said[-1] == "<｜end▁of▁sentence｜>"
    assert all(len(piece) == 1 for piece in said if piece is not None and any(c.isdigit() for c in piece))
    assert all(tokenizer.special_id(tag) in tokenizer.special_ids for tag in POINTING)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_a_function_of_its_number_also_in_another_process(family: Family) -> None:
    source = Source(folder=find_model(NAMES[family]), capacity=CAPACITY, kinds=("colour", "text"))
    feed = Feed(source=source, processes=1, slots=1, first=3)
    feed.start()
    try:
        for wanted in (3, 4):  # the second in memory that the first has used
            found = feed.take(60.0)
            assert found is not None
            slot, number, kinds = found
            arrays, expected = make_step(source, learner_of(source.folder), wanted)
            assert number == wanted and kinds == expected and set(kinds) == {"colour", "text"}
            for name, values in feed.views(slot):
                assert np.array_equal(values, arrays[name]), name
            feed.give_back(slot)
    finally:
        feed.stop()


def test_a_signal_to_the_whole_group_leaves_the_makers_of_steps_at_work() -> None:
    source = Source(folder=find_model("spyglass-tiny-v4"), capacity=CAPACITY, kinds=("text",))
    feed = Feed(source=source, processes=1, slots=1)
    feed.start()
    try:
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        for wanted, ending in enumerate((signal.SIGTERM, signal.SIGINT)):
            found = feed.take(60.0)
            assert found is not None and found[1] == wanted
            os.kill(worker.pid, ending)
            feed.give_back(found[0])
        assert feed.take(60.0) is not None
    finally:
        feed.stop()
    assert not multiprocessing.active_children()


def test_the_makers_of_steps_end_with_their_parent() -> None:
    program = f"""
import os, multiprocessing
from pathlib import Path
from scripts.tiny import feed
from scripts.tiny.tests.test_script import CAPACITY
feed.LOOK_EVERY = 0.2
source = feed.Source(folder=Path({str(find_model("spyglass-tiny-v4"))!r}), capacity=CAPACITY, kinds=("text",))
made = feed.Feed(source=source, processes=1, slots=1)
made.start()
assert made.take(60.0) is not None
print(multiprocessing.active_children()[0].pid, flush=True)
os._exit(1)
"""
    pid = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, text=True).stdout)
    status, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 30
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError("it goes on without its parent")
        time.sleep(0.1)


@pytest.mark.parametrize("missing", ["elapsed", "drawn", "taught"])
def test_a_state_that_does_not_say_what_was_taught_is_refused_before_anything_is_started(
    tmp_path: Path, missing: str
) -> None:
    """Earlier versions kept no list of taught tokens, and it cannot be read off the weights."""
    facts = {"elapsed": 1.5, "drawn": 7, "taught": [3, 5]}
    save_state(tmp_path / "state", State(step=4, tensors={}, facts={k: v for k, v in facts.items() if k != missing}))
    with pytest.raises(SystemExit, match=rf"does not say {missing}, so.*another --folder.*--start .*{NAMES['v4']}$"):
        train.main(["v4", "--folder", str(tmp_path), "--device", "cpu"])
    assert not multiprocessing.active_children() and [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_state_says_where_its_run_was_and_a_run_without_one_begins(tmp_path: Path) -> None:
    options = Options(family="v4", folder=tmp_path, minutes=1, horizon=1, rate=1, start=None, seed=0, workers=1,
                      device="cpu", compiled=False, capacity=CAPACITY)  # fmt: skip
    facts = {"elapsed": 1.5, "drawn": 7, "taught": [3, 5]}
    assert train.facts_of(State(step=4, tensors={}, facts=facts), options) == facts
    assert train.facts_of(None, options) == {"elapsed": 0.0, "drawn": 0, "taught": []}


def test_a_place_is_written_again_when_all_are_taken_the_oldest_first() -> None:
    kept = Kept(torch.device("cpu"), 2)
    places = []
    for number in range(5):
        places.append(kept.add({"x": torch.tensor([number])}))
        kept.used(places[-1])
    assert places == [0, 1, 0, 1, 0] and [int(step["x"]) for step in kept.steps] == [4, 3] and kept.uses == [1, 1]
    assert {kept.repeat(random.Random(seed)) for seed in range(20)} == {0, 1}
    kept.used(0)
    assert {kept.repeat(random.Random(seed)) for seed in range(20)} == {1}, "the least used first"
    kept.used(1)
    for _ in range(MOST_USES - 2):
        assert kept.repeat(random.Random(0)) is not None
        kept.used(0)
        kept.used(1)
    assert kept.repeat(random.Random(0)) is None


def test_each_target_knows_its_case() -> None:
    source = Source(folder=find_model("spyglass-tiny-v41"), capacity=CAPACITY)
    arrays, kinds = make_step(source, learner_of(source.folder), 0)
    used = arrays["sample_R"] >= 0
    assert np.array_equal(used, arrays["targets_R"] >= 0)
    assert sorted(set(arrays["sample_R"][used].tolist())) == list(range(len(kinds)))
    assert all(f"engram_TJ{layer}" in arrays for layer in (1, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_models_are_small_and_of_the_official_shape(family: Family) -> None:
    shipped = find_model(NAMES[family])
    assert sum(path.stat().st_size for path in shipped.iterdir() if path.is_file()) <= 12_000_000
    values = json.loads((shipped / "config.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(shipped)
    assert tokenizer is not None
    placeholder = tokenizer.special_id("<｜deepseek_image｜>")
    classes = values.get("text_config", {}).get("engram_compressed_vocab_size", 0)
    assert placeholder is not None
    assert values == tiny_config(family, VOCAB_SIZE, image_token_id=placeholder, classes=classes)
    config = parse_model_config(values, family)
    text = config.text
    assert (text.head_dim, text.layers[0].rope.dim, text.sliding_window, text.hc_mult) == (512, 64, 128, 4)
    ratios = {plan.ratio for plan in text.layers}
    assert ratios == ({0, 4, 128} if family == "v4" else {0, 1, 2})
    names = param_table(config)
    for part in (".tid2eid",) if family == "v4" else (".engram.wkv", ".engram.embed"):
        assert any(name.endswith(part) for name in names)
    assert any(name.endswith("bias_vl") for name in names) and any(".indexer." in name for name in names)
    assert {names[f"layers.0.ffn.experts.0.{w}"].format.name for w in ("w1", "w2", "w3")} == {"fp4"}
    assert names["layers.0.attn.wq_b"].format.name == "fp8"


def test_the_rate_rises_holds_and_ends_at_zero() -> None:
    shares = [rate_at(step / 100) for step in range(101)]
    assert shares[0] == 0 and shares[2] == shares[40] == 1 and shares[100] == 0
    assert all(later <= earlier for earlier, later in pairwise(shares[2:]))
