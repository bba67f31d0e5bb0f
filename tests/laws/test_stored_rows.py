"""Rows as codes = plain rows, bit for bit: memory that holds what the model rounds to changes no logit of it.

Whatever happens to rows: written in chunks, found in a prefix cache, lost and computed again, taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch

from spyglass.config.cache import cache_plans, stores_rows
from spyglass.engine.cache.pages import groups_of
from spyglass.engine.engine import Engine
from spyglass.engine.request import RequestOutput
from spyglass.prompt.build import prompt_from_parts
from tests import engine_parts, small_v41
from tests.cache_parts import BOTH_CACHES, MIXED, SHOWN, finish, picture, spread, text
from tests.engine_parts import PAGE_ROWS, engine_config
from tests.small_models import ops_of, small_model

KINDS = [
    ("v4", "reference", torch.float32),
    *((family, "auto", dtype) for family in ("v4", "v4.1") for dtype in (torch.float32, torch.bfloat16)),
]

FIRST: list[Any] = [text(40, 1), picture(4, 4, 2), text(33, 3)]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model of reference numerics, and engines over it whose memory holds codes, or plain rows."""

    model: Any
    build: Callable[..., Engine]
    page_rows: dict[str, int]

    def engines(self, **options: Any) -> tuple[Engine, Engine]:
        return self.build(stored=True, **options), self.build(stored=False, **options)

    def prompt(self, parts: Sequence[Any]) -> Any:
        return prompt_from_parts(list(parts), self.model.config)

    def cache_bytes(self, tokens: int, sequences: int, step: int, stored: bool) -> int:
        """Memory that holds so many tokens beside the rings."""
        groups = groups_of(
            cache_plans(self.model.config.text, stored=stored), self.model.options.build.dtype, self.page_rows
        )
        rings = [group for group in groups if group.retention is not None]
        fixed = sum(g.page_bytes * (sequences * (g.kept_pages + 1) + -(-step // g.page_rows)) for g in rings)
        each = sum(g.page_bytes / (g.page_rows * g.tokens_per_row) for g in groups if g.retention is None)
        return fixed + int(each * (tokens + 0.5))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{str(kind[2])[6:]}")
def pair(request: pytest.FixtureRequest) -> Pair:
    family, which, dtype = request.param
    name: Literal["auto", "reference"] = which
    ops = ops_of(("cpu", name), str(dtype).removeprefix("torch."))
    options: dict[str, Any] = {"numerics": "reference", "dtype": dtype, "ops": ops}
    if family == "v4":
        config = engine_config()
        model = small_model(3, config=config, **options)
        return Pair(
            model=model, build=partial(engine_parts.make_engine, model, config, dtype=dtype), page_rows=PAGE_ROWS
        )
    model = small_v41.small_v41_model(3, **options)
    return Pair(model=model, build=partial(small_v41.make_engine, model), page_rows=small_v41.PAGE_ROWS)


def assert_same(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> None:
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.token_ids == plain.token_ids
        np.testing.assert_array_equal(spread(mine), spread(plain))


def ask(engine: Engine, prompts: Sequence[Any], params: Any = SHOWN) -> list[RequestOutput]:
    return finish(engine, [engine.add(prompt, params) for prompt in prompts])


def test_only_rows_of_reference_numerics_are_codes() -> None:
    assert stores_rows("reference", "cpu")
    assert not any(stores_rows("plain", device) for device in ("cpu", "cuda"))


def test_codes_take_less_memory(pair: Pair) -> None:
    ours, plain = pair.engines()
    for engine in (ours, plain):
        ask(engine, [pair.prompt(FIRST)])
    kinds = {kind: pages.dtype for (kind, _), pages in ours.allocator.pages.items()}
    assert {kinds[kind] for kind in ("window", "pool", "index")} == {torch.uint8}
    assert ours.allocator.bytes_allocated < plain.allocator.bytes_allocated


@pytest.mark.parametrize("step", [40, 200])
def test_prompts_in_chunks_and_whole_then_decoding(step: int, pair: Pair) -> None:
    prompts = [pair.prompt(parts) for parts in (FIRST, [text(150, 4)], MIXED, [text(1, 5)], [text(129, 6)])]
    ours, plain = pair.engines(step=step)
    params = replace(SHOWN, max_tokens=12)
    assert_same(ask(ours, prompts, params), ask(plain, prompts, params))
    assert_same(ask(ours, prompts[1:2], params), ask(plain, prompts[1:2], params))


def test_prefixes_that_are_found(pair: Pair) -> None:
    engines = pair.engines(step=60, **BOTH_CACHES)
    parts: list[Any] = list(FIRST)
    for more in (text(20, 7), picture(5, 5, 8), text(90, 9)):
        ours, plain = ([ask(engine, [pair.prompt(parts)])[0]] for engine in engines)
        assert_same(ours, plain)
        parts += [ours[0].token_ids, more]
    found = [engine.prefixes.counts.found_tokens for engine in engines]
    assert found[0] == found[1] > 0
    held = [engine.prefixes.counts.bytes_held for engine in engines]
    assert held[0] < held[1]


def test_answers_that_were_preempted(pair: Pair) -> None:
    prompts = [pair.prompt([text(length, length)]) for length in (90, 60, 20)]
    params = replace(SHOWN, max_tokens=90)
    engines = [
        pair.build(stored=stored, max_sequences=3, max_length=400, cache_bytes=pair.cache_bytes(260, 3, 64, stored))
        for stored in (True, False)
    ]
    assert [pool.limit for pool in engines[0].allocator.pools.values()] == [
        pool.limit for pool in engines[1].allocator.pools.values()
    ]
    ours, plain = (ask(engine, prompts, params) for engine in engines)
    assert_same(ours, plain)
    counts = [engine.stats().preemptions for engine in engines]
    assert counts[0] == counts[1] > 0


def test_answers_of_which_tokens_were_taken_back(pair: Pair) -> None:
    engines = pair.engines(lookahead=4)
    outputs = []
    for engine in engines:
        request = engine.add(pair.prompt(FIRST), replace(SHOWN, max_tokens=40))
        done, turns = None, 0
        while engine.has_work:
            for delta in engine.step():
                done = delta.output or done
            turns += 1
            if done is None and turns % 5 == 0:
                engine.truncate(request, min(3, engine.sequences[request].answer.revocable))
        assert done is not None
        outputs.append(done)
    assert_same(outputs[:1], outputs[1:])
