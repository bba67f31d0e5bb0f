"""A model on several processes answers as it does on one, through the whole engine; when one of them goes, all go."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.config.engine import EngineConfig
from spyglass.engine.engine import Engine
from spyglass.engine.llm import LLM
from spyglass.engine.ranks import Ranks
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.errors import AdapterError, RankError
from spyglass.params.targets import GROUPS
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from tests.adapter_parts import random_adapter, shapes_of
from tests.engine_parts import patches
from tests.laws.test_drafts import LOOKAHEAD, Guesser
from tests.ranks import DIVISIBLE
from tests.small_models import random_text
from tests.tolerance import assert_law
from tests.unit.checkpoint.small_files import write_small

CACHE_BYTES = 1_746_168  # windows of six sequences, and the rows of a step and something
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=7, max_tokens=10, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "small"
    write_small(folder, packed=False, **DIVISIBLE)
    return folder


def load(model: Path | str, size: int, **options: Any) -> LLM:
    options = {"max_step_tokens": 420, "max_sequences": 6, "cache_bytes": None, **options}
    return LLM(model, "cpu", "float32", "plain", tensor_parallel_size=size, threads=1, **options)


@pytest.fixture(scope="module", params=["v4 on 2", "v4 on 4", "v41 on 2"])
def pair(request: pytest.FixtureRequest, v4: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same model on one process and on several."""
    family, _, size = request.param.partition(" on ")
    model: Path | str = v4 if family == "v4" else "spyglass-tiny-v41"
    divided = load(model, int(size), async_scheduling="on" if size == "4" else "off")
    yield load(model, 1), divided
    divided.close()


def prompts(llm: LLM) -> list[Prompt]:
    given = [([40], 0), ([9, (4, 4), 5, (6, 4), 30], 1), ([150], 2), ([5, (4, 6), 60], 3)]
    return [make_prompt(llm, parts, seed) for parts, seed in given]


def make_prompt(llm: LLM, parts: list[Any], seed: int = 0) -> Prompt:
    assert llm.config.vision is not None
    side = llm.config.vision.patch_size
    pieces = [
        patches(*part, seed=seed, patch=side) if isinstance(part, tuple) else random_text(part, seed, 68).tolist()
        for part in parts
    ]
    return prompt_from_parts(pieces, llm.config)


def run(llm: LLM, asked: list[tuple[Prompt, SamplingParams, str | None]]) -> list[RequestOutput]:
    return llm.generate([one for one, *_ in asked], [p for _, p, _ in asked], adapter=[name for *_, name in asked])


def test_answers_of_several_processes_are_those_of_one(pair: tuple[LLM, LLM]) -> None:
    """Text and images, greedy and drawn, together and again from prefixes and images that are known."""
    alone, divided = pair
    asked = [(prompt, (GREEDY, DRAWN)[n % 2], None) for n, prompt in enumerate(prompts(alone))]
    expected = run(alone, asked)
    for _ in range(2):
        for ours, theirs in zip(run(divided, asked), expected, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.error is None
            if theirs.logprobs is not None and ours.logprobs is not None:
                drawn = ([entry.logprob for entry in output.logprobs or ()] for output in (ours, theirs))
                assert_law(*map(torch.tensor, drawn))
    again = make_prompt(alone, [12, (4, 4)], 1), GREEDY, None
    assert run(divided, [again])[0].token_ids == run(alone, [again])[0].token_ids
    assert divided.engine.stats().prefix_hits and divided.engine.stats().image_hits
    one = [run(divided, [each])[0].token_ids for each in asked]
    assert one == [output.token_ids for output in expected], "whatever shares the step"


def test_logits_of_every_position_are_those_of_one_process(pair: tuple[LLM, LLM]) -> None:
    alone, divided = pair
    ids = random_text(200, 3, 68).tolist()
    assert_law(divided.logits(ids), alone.logits(ids))


def test_adapters_come_to_all_processes_and_go_from_them(pair: tuple[LLM, LLM]) -> None:
    """Of every group, routed experts included; rows without one notice nothing."""
    alone, divided = pair
    adapter = random_adapter(shapes_of(alone.loaded.model), GROUPS, seed=2)
    asked = [(prompt, GREEDY, (None, "it")[n % 2]) for n, prompt in enumerate(prompts(alone))]
    for llm in pair:
        llm.lora.attach("it", adapter)
    expected = [output.token_ids for output in run(alone, asked)]
    assert [output.token_ids for output in run(divided, asked)] == expected
    bare = [(prompt, params, None) for prompt, params, _ in asked]
    assert [output.token_ids for output in run(divided, bare)] != expected
    for llm in pair:
        llm.remove_adapter("it")
    assert [o.token_ids for o in run(divided, bare)] == [o.token_ids for o in run(alone, bare)]
    with pytest.raises(AdapterError, match="tensor_parallel_size=1"):
        divided.new_adapter(["attention"], rank=2, alpha=4)


def test_answers_that_are_preempted_are_the_same(v4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.engine.scheduler.GROWTH", 0)
    alone = load(v4, 1)
    long = replace(GREEDY, max_tokens=150)
    asked = [(make_prompt(alone, [40 + 9 * n], n), long, None) for n in range(6)]
    expected = [output.token_ids for output in run(alone, asked)]
    divided = load(v4, 2, cache_bytes=CACHE_BYTES, prefix_cache_bytes=1 << 20)
    assert [output.token_ids for output in run(divided, asked)] == expected
    assert divided.engine.stats().preemptions
    divided.close()


def test_drafts_are_kept_and_taken_back_on_all_processes(v4: Path) -> None:
    """With the streams of two layers captured, and prefixes that are left in between."""
    alone, divided = load(v4, 1), load(v4, 2)
    given = [make_prompt(alone, [40 + 30 * n], n) for n in range(3)]
    long = replace(GREEDY, max_tokens=24)
    expected = [output.token_ids for output in run(alone, [(prompt, long, None) for prompt in given])]
    answers = {prompt.ids_T.tobytes(): ids for prompt, ids in zip(given, expected, strict=True)}
    drafter = Guesser(answers, np.random.default_rng(0), alone.config.text.vocab_size, capture=(0, 2))
    engine = Engine(
        divided.loaded.model,
        divided.config,
        EngineConfig(max_sequences=4, step_milliseconds=0, prefix_cache_bytes=1 << 24),
        dtype=torch.float32,
        device=torch.device("cpu"),
        banned=divided.banned_tokens,
        lookahead=LOOKAHEAD,
        drafter=drafter,
        ranks=divided.ranks,
    )
    for _ in range(2):
        ids = [engine.add(prompt, long) for prompt in given]
        done: dict[int, RequestOutput] = {}
        while engine.has_work:
            done |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
        assert [done[number].token_ids for number in ids] == expected
    assert drafter.accepted and drafter.refused and engine.stats().prefix_hits
    divided.close()


def test_where_there_is_no_shared_memory_steps_go_through_pipes_which_is_said(
    v4: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("os.posix_fallocate", lambda *arguments: (_ for _ in ()).throw(OSError("no room")))
    llm = load(v4, 2)
    assert "steps are sent through pipes" in caplog.text
    asked = [(make_prompt(llm, [40]), GREEDY, None)]
    assert run(llm, asked)[0].token_ids == run(load(v4, 1), asked)[0].token_ids
    llm.close()


def test_a_process_that_cannot_load_its_part_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 \(process \d+\) failed: ConfigError: .*gone"):
        Ranks(2, torch.device("cpu"), {"path": tmp_path / "gone", "dtype": "float32"}, threads=1).answers()


@pytest.mark.parametrize(
    ("sign", "said"), [(signal.SIGKILL, "has ended with signal SIGKILL"), (signal.SIGSTOP, "hangs")]
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_ends_or_hangs_ends_all_with_its_name(v4: Path, sign: int, said: str, busy: bool) -> None:
    llm = load(v4, 2)
    assert llm.ranks is not None
    pid = llm.ranks.pids[0]
    steps = llm.stream(make_prompt(llm, [30]), SamplingParams(max_tokens=3000, ignore_eos=True))
    next(steps)
    os.kill(pid, sign)
    with pytest.raises(RankError, match=rf"rank 1 \(process {pid}\) {said}"):
        while True:
            next(steps) if busy else time.sleep(0.05)
            llm.ranks.require_alive()
    with pytest.raises(RankError, match="load it again"):
        llm.generate([[5, 6]], GREEDY)
    llm.close()
    assert is_gone(pid)


def test_nothing_is_left_of_a_model_that_is_let_go(v4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = len(os.listdir("/proc/self/fd"))
    llm = load(v4, 2)
    run(llm, [(make_prompt(llm, [30]), GREEDY, None)])
    assert llm.ranks is not None
    pid = llm.ranks.pids[0]
    assert list(tmp_path.iterdir())
    del llm
    gc.collect()
    assert is_gone(pid) and not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= before + 8, "gloo keeps a few sockets until its threads end"


def is_gone(pid: int) -> bool:
    """Not even a zombie is left."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
