"""Whatever is drafted, kept or taken back, answers are those of an engine that never tried anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from spyglass.config.engine import EngineConfig
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.engine import Engine
from spyglass.engine.llm import LLM
from spyglass.engine.request import RequestOutput, SamplingParams, Structured
from spyglass.engine.runner import RunningStep
from spyglass.engine.sequence import TokenSequence
from spyglass.engine.structured.grammar import GrammarCompiler
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from tests.engine_parts import NO_CACHES, Impatient, mixed_parts, pages_used, run_all
from tests.laws.test_interleavings import FAMILIES, World, assert_as_alone, make_world, play
from tests.tolerance import LAW_OF_MAX

LOOKAHEAD = 6
SCHEMA = {"type": "array", "items": {"enum": ["red", 7]}, "minItems": 3}


@dataclass
class Guesser:
    """Proposes the right tokens of some answers, up to a wrong one somewhere; `answers` by the ids of the prompt."""

    answers: Mapping[bytes, Sequence[int]]
    random: np.random.Generator
    vocab_size: int
    capture: tuple[int, ...] = ()
    accepted: int = 0
    refused: int = 0
    captured: list[dict[int, torch.Size]] = field(default_factory=list)

    def propose(self, sequences: Sequence[TokenSequence], most: Sequence[int]) -> list[list[int]]:
        return [self._guess(sequence, count) for sequence, count in zip(sequences, most, strict=True)]

    def _guess(self, sequence: TokenSequence, most: int) -> list[int]:
        said = len(sequence.answer.token_ids)
        right = self.answers[sequence.prompt.ids_T.tobytes()]
        tokens = list(right[said : said + int(self.random.integers(0, most + 1))])
        if tokens and self.random.random() < 0.6:
            tokens[int(self.random.integers(len(tokens)))] = int(self.random.integers(1, self.vocab_size))
        return tokens

    def observe(self, step: RunningStep) -> None:
        for chunk in step.chunks:
            kept = max(0, min(len(chunk.drafts), chunk.sequence.known - 1 - (chunk.stop - len(chunk.drafts))))
            self.accepted += kept
            self.refused += len(chunk.drafts) - kept
        self.captured.append({layer: streams.shape for layer, streams in step.result.captured.items()})


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> World:
    return make_world(FAMILIES[request.param], requests=24)


def guesser(world: World, **options: Any) -> Guesser:
    """The answers of those who share a prompt differ; the last one's are guessed for all."""
    prompts = [prompt.ids_T.tobytes() for prompt, _ in world.requests]
    answers = dict(zip(prompts, [output.token_ids for output in world.alone], strict=True))
    return Guesser(answers, np.random.default_rng(5), world.model.config.text.vocab_size, **options)


@pytest.mark.parametrize(
    "caches",
    [
        NO_CACHES,
        {"prefix_cache_bytes": 1_000_000, "image_cache_bytes": 10_000},
        {**NO_CACHES, "step_milliseconds": 1},
    ],
    ids=["cold", "cached", "between layers"],
)
def test_drafted_answers_are_those_that_would_have_been_drawn(
    caches: dict[str, int], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and random ones, with penalties, stop ids, log-probabilities, images, preemption and cancels."""
    monkeypatch.setattr("spyglass.engine.shares.Pace", Impatient)
    monkeypatch.setattr("spyglass.engine.scheduler.GROWTH", 0)  # memory runs out in the middle of answers
    drafter = guesser(world, capture=(1,))
    engine = world.family.engine(
        world.model,
        step=43,
        cache_bytes=int(1.15 * world.family.cache_bytes),
        lookahead=LOOKAHEAD,
        drafter=drafter,
        **caches,
    )
    done = play(engine, world.requests, np.random.default_rng(8))
    assert drafter.accepted > 50 and drafter.refused > 50
    assert engine.stats().preemptions >= 1
    assert all(list(shapes) == [1] for shapes in drafter.captured)
    engine.prefixes.clear()
    assert set(pages_used(engine).values()) == {0}
    for number, alone in enumerate(world.alone):
        assert_as_alone(done[number], alone)


def play_back(engine: Engine, prompt: Prompt, params: SamplingParams, random: np.random.Generator) -> RequestOutput:
    """One answer, from which some of the last tokens are taken back now and then."""
    request, most = engine.add(prompt, params), 60
    while True:
        for delta in engine.step():
            if delta.output is not None:
                return delta.output
        sequence = engine.sequences[request]
        count = int(random.integers(0, sequence.answer.revocable + 1))
        if most and count and random.random() < 0.3:
            most -= 1
            engine.truncate(request, count)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("length", [1, 8, 126, 250])
def test_tokens_that_are_taken_back_come_again(length: int, mode: str, world: World) -> None:
    """Across the wrap of every ring and the borders of groups of both ratios, in small pages full of NaN."""
    model = world.model
    params = SamplingParams(
        seed=3, max_tokens=40, ignore_eos=True, logprobs=1, repetition_penalty=1.2, frequency_penalty=0.3
    )
    prompt = text_prompt(world, length)
    [plain] = run_all(world.family.engine(model), [prompt], params)
    for caches in (NO_CACHES, {"prefix_cache_bytes": 1_000_000}):
        engine = world.family.engine(model, lookahead=LOOKAHEAD, async_scheduling=mode, **caches)
        output = play_back(engine, prompt, params, np.random.default_rng(length))
        assert output.token_ids == plain.token_ids
        ours, theirs = ([e.logprob for e in o.logprobs or ()] for o in (output, plain))
        np.testing.assert_allclose(ours, theirs, atol=30 * LAW_OF_MAX)
        engine.prefixes.clear()
        assert set(pages_used(engine).values()) == {0}


def text_prompt(world: World, length: int) -> Prompt:
    return prompt_from_parts(mixed_parts([length], seed=1), world.model.config)


def test_a_prefix_that_others_share_is_not_written_by_who_takes_tokens_back(world: World) -> None:
    """A snapshot of an answer stays what it was when its sequence goes another way behind it."""
    model = world.model
    prompt = text_prompt(world, 30)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [plain] = run_all(world.family.engine(model), [prompt], params)
    engine = world.family.engine(model, lookahead=LOOKAHEAD, prefix_cache_bytes=1_000_000)
    random = np.random.default_rng(0)
    request = engine.add(prompt, replace(params, temperature=1.0, seed=5))
    while engine.has_work:
        engine.step()
        if request in engine.sequences and (said := len(engine.sequences[request].answer.token_ids)) > LOOKAHEAD:
            if random.random() < 0.25 and said < 35:
                engine.truncate(request, engine.sequences[request].answer.revocable)
    [again] = run_all(engine, [prompt], params)
    assert again.token_ids == plain.token_ids


@pytest.mark.parametrize("model", ["spyglass-tiny-v4"])
@pytest.mark.parametrize("way", ["draft", "truncate", "ahead", "truncate ahead"])
def test_text_stop_strings_grammars_and_adapters_follow(model: str, way: str) -> None:
    options: dict[str, Any] = {"adapters": {"roman": "roman"}, "prefix_cache_bytes": 0, "max_sequences": 4}
    plain = LLM(model, "cpu", "float32", "plain", **options)
    chat = [{"role": "user", "content": "Who are you? Say it in a long sentence about é."}]
    prompt = plain.chat_prompt(chat)
    forms: list[tuple[dict[str, Any], str | None]] = [
        ({"stop": ("is r", "é"), "logprobs": 1}, None),
        ({"structured": Structured(kind="regex", value="[a-zé]{2,9} (one|two|three) [a-z]{5,30}\\.")}, None),
        (
            {"structured": Structured(kind="json_schema", value=SCHEMA)},
            "roman",
        ),
        ({"repetition_penalty": 1.3, "stop": ("zzz",)}, "roman"),
    ]
    for more, adapter in forms:
        params = SamplingParams(seed=4, temperature=0.9, max_tokens=30, **more)
        [expected] = plain.generate([prompt], params, adapter=adapter)
        right = {prompt.ids_T.tobytes(): expected.token_ids}
        drafter = Guesser(right, np.random.default_rng(1), plain.config.text.vocab_size, capture=(0, 2))
        engine = engine_of(plain, drafter if way == "draft" else None, "on" if "ahead" in way else "off")
        random = np.random.default_rng(2)
        request = engine.add(prompt, params, adapter=plain.adapter_use(adapter))
        output: RequestOutput | None = None
        while output is None:
            for delta in engine.step():
                output = delta.output
            if "truncate" in way and output is None and random.random() < 0.3:
                engine.truncate(request, int(random.integers(0, engine.sequences[request].answer.revocable + 1)))
        assert (output.token_ids, output.text, output.finish_reason, output.stopped_by) == (
            expected.token_ids, expected.text, expected.finish_reason, expected.stopped_by,
        ), more  # fmt: skip
        assert way != "draft" or (drafter.accepted > 0 and all(list(seen) == [0, 2] for seen in drafter.captured))


def engine_of(llm: LLM, drafter: Guesser | None, ahead: Literal["on", "off"]) -> Engine:
    """Another engine on the model of an `LLM`."""
    assert llm.tokenizer is not None
    token_bytes = TokenBytes(llm.tokenizer)
    return Engine(
        llm.loaded.model,
        llm.config,
        EngineConfig(
            cache_bytes=200_000_000, max_sequences=4, step_milliseconds=0, async_scheduling=ahead, **NO_CACHES
        ),
        dtype=llm.loaded.dtype,
        device=llm.loaded.device,
        banned=llm.banned_tokens,
        token_bytes=token_bytes,
        grammars=GrammarCompiler(token_bytes, llm.config, cpu_seconds=20.0),
        lookahead=LOOKAHEAD,
        drafter=drafter,
    )


@dataclass
class Listener(Guesser):
    """Proposes nothing, and keeps the streams it sees."""

    seen: list[dict[int, torch.Tensor]] = field(default_factory=list)

    def propose(self, sequences: Sequence[TokenSequence], most: Sequence[int]) -> list[list[int]]:
        return [[] for _ in sequences]

    def observe(self, step: RunningStep) -> None:
        self.seen.append({layer: streams.clone() for layer, streams in step.result.captured.items()})


def test_streams_from_a_captured_graph_are_those_of_ops_one_by_one() -> None:
    llm = LLM("spyglass-tiny-v4", "cpu", "float32", "plain", prefix_cache_bytes=0, max_sequences=4)
    seen: list[list[dict[int, torch.Tensor]]] = []
    for captures in (False, True):
        listener = Listener({}, np.random.default_rng(0), 0, capture=(0, 2))
        engine = engine_of(llm, listener, "off")
        if not captures:
            engine.step_runner.capture.backend = "eager"
        prompts = [prompt_from_parts([list(range(5, 20 + n))], llm.config) for n in range(3)]
        run_all(engine, prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        assert (engine.step_runner.capture.replays > 0) is captures
        seen.append(listener.seen)
    assert len(seen[0]) == len(seen[1]) > 5
    for plain, captured in zip(*seen, strict=True):
        assert all(torch.equal(plain[layer], captured[layer]) for layer in (0, 2))
