"""Adapters, forms of answer, stop strings, caches, preemption and cancelling in one: each gets what it gets alone.

The small models that come with the package, fp32 and plain, so that nothing but a fault can tell two runs apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spyglass.engine.llm import LLM
from spyglass.engine.request import RequestOutput, SamplingParams, Structured
from spyglass.prompt.tokens import Prompt
from tests.engine_parts import Impatient
from tests.tolerance import LOGPROB_LAW

REQUESTS = 24
BYTES = {"spyglass-tiny-v4": 42_650_000, "spyglass-tiny-v41": 30_000_000}  # some 640 tokens beside 8 windows
FORMS = [
    None,
    None,
    None,
    Structured(kind="regex", value="[a-zé]{2,9} (one|two|three)"),
    Structured(kind="choice", value=("It is red.", "Il est bleu.", "éà")),
    Structured(
        kind="json_schema", value={"type": "array", "items": {"enum": ["red", 7]}, "minItems": 3, "maxItems": 9}
    ),
]
STOPS: list[tuple[str, ...]] = [(), ("is r", "é"), (), ("\ufffd",), ("ee.",)]
HEADS = [
    "Look at what is shown and say what it is. " * 2,
    "A beginning that several of them share, and that is long enough to be found again. ",
]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    prompt: Prompt
    params: SamplingParams
    adapter: str | None


def make_llm(model: str, **options: Any) -> LLM:
    adapters = {"roman": "roman", "negative": "negative"}
    return LLM(model, "cpu", "float32", "plain", max_length=640, adapters=adapters, **options)


def conversation(random: np.random.Generator, pictures: list[Image.Image]) -> list[dict[str, Any]]:
    shown = [
        {"type": "image_url", "image_url": {"url": pictures[n]}} for n in random.integers(0, 3, random.integers(2))
    ]
    question = {"type": "text", "text": str(random.choice(["How many?", "What colour is it?", "Where is the é?"]))}
    return [{"role": "user", "content": [{"type": "text", "text": str(random.choice(HEADS))}, *shown, question]}]


def make_requests(llm: LLM, random: np.random.Generator) -> list[Asked]:
    """A half of them with the prompt of an earlier one, most of those under another adapter."""
    pictures = [
        Image.new("RGB", size, colour) for size, colour in (((84, 84), "red"), ((300, 99), "blue"), ((9, 9), 0))
    ]
    asked: list[Asked] = []
    for number in range(REQUESTS):
        params = SamplingParams(
            temperature=float(random.choice([0, 0, 0.9])),
            seed=number,
            max_tokens=int(random.choice([1, 80, 110])),
            ignore_eos=number % 4 > 0,
            stop=STOPS[number % len(STOPS)],
            structured=FORMS[random.integers(len(FORMS))],
            logprobs=[None, 1][number % 2],
        )
        again = bool(asked) and random.random() < 0.5
        prompt = asked[-1].prompt if again else llm.chat_prompt(conversation(random, pictures))
        asked.append(Asked(prompt=prompt, params=params, adapter=[None, "roman", "negative"][random.integers(3)]))
    return asked


def play(llm: LLM, asked: list[Asked], random: np.random.Generator) -> dict[int, RequestOutput]:
    """A few come at a time; some are cancelled, and an adapter that nobody uses comes and goes meanwhile."""
    numbers: dict[int, int] = {}
    done: dict[int, RequestOutput] = {}
    said = [""] * len(asked)
    todo = list(enumerate(asked))
    while todo or llm.engine.has_work:
        for number, one in todo[: random.integers(0, 6)]:
            numbers[llm.engine.add(one.prompt, one.params, adapter=llm.adapter_use(one.adapter))] = number
            todo.pop(0)
        for delta in llm.engine.step():
            said[numbers[delta.request_id]] += delta.text
            if delta.output is not None:
                done[numbers[delta.request_id]] = delta.output
        live = [request for request, number in numbers.items() if number not in done]
        if live and random.random() < 0.02:
            last = llm.engine.abort(int(random.choice(live)))
            assert last is not None and last.output is not None
            done[numbers[last.request_id]] = last.output
        if random.random() < 0.1:
            llm.remove_adapter("guest") if "guest" in llm.adapters else llm.add_adapter("guest", "roman", factor=2.0)
    assert all(said[number] == output.text for number, output in done.items() if output.finish_reason != "abort")
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ahead", "ranks"),
    [
        ("spyglass-tiny-v4", "on", 1),
        ("spyglass-tiny-v4", "off", 1),
        ("spyglass-tiny-v41", "off", 1),
        ("spyglass-tiny-v41", "on", 2),
    ],
)
def test_whatever_comes_together_each_gets_what_it_gets_alone(
    model: str, ahead: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps one by one, some between the layers of others, and steps one ahead; on one process, and on two."""
    quiet = make_llm(model, prefix_cache_bytes=0, image_cache_bytes=0)
    asked = make_requests(quiet, np.random.default_rng(3))
    alone = [quiet.generate([one.prompt], one.params, adapter=one.adapter)[0] for one in asked]
    monkeypatch.setattr("spyglass.engine.shares.Pace", Impatient)
    monkeypatch.setattr("spyglass.engine.scheduler.GROWTH", 0)  # memory runs out in the middle of answers
    sizes = {
        "max_step_tokens": 420,
        "step_milliseconds": int(ahead == "off"),
        "max_sequences": 8,
        "cache_bytes": BYTES[model],
        "async_scheduling": ahead,
    }
    caches = {"prefix_cache_bytes": 200_000_000, "image_cache_bytes": 100_000}
    llm = make_llm(model, **caches, **sizes, tensor_parallel_size=ranks)
    done = play(llm, asked, np.random.default_rng(4))
    stats = llm.engine.stats()
    assert stats.preemptions and stats.prefix_hits and stats.image_hits and stats.prefix_evictions
    reasons = [done[number].finish_reason for number in range(REQUESTS)]
    assert set(reasons) == {"stop", "length", "abort"}
    for number, expected in enumerate(alone):
        output = done[number]
        if output.finish_reason == "abort":
            assert output.error is None and output.token_ids == expected.token_ids[: len(output.token_ids)]
            continue
        assert (output.token_ids, output.text) == (expected.token_ids, expected.text), asked[number].params
        assert (output.finish_reason, output.stopped_by) == (expected.finish_reason, expected.stopped_by)
        ours, theirs = ([entry.logprob for entry in o.logprobs or ()] for o in (output, expected))
        np.testing.assert_allclose(ours, theirs, atol=LOGPROB_LAW)
    llm.engine.prefixes.clear()
    assert llm.engine.stats().cache_share == 0
    llm.close()
