"""A model that is divided among ranks is the whole model: logits, answers and adapters, whatever shares a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.lora.pool import AdapterPool
from spyglass.lora.use import NO_ADAPTER
from spyglass.ops.declare import Ops
from spyglass.params.targets import GROUPS
from spyglass.prompt.tokens import Prompt
from tests.adapter_parts import Small, logits_together, random_adapter
from tests.engine_parts import engine_config
from tests.ranks import DIVISIBLE, divided, on_all_ranks
from tests.small_models import empty_model, random_weights
from tests.small_v41 import small_v41_config
from tests.tolerance import assert_law

PARTS: list[int | tuple[int, int]] = [3, (4, 4), 25, (3, 5), 140]
CASES = [("v4", 2), ("v4", 4), ("v41", 2)]


@cache
def world(family: str, packed: bool = False) -> Small:
    config = small_v41_config(**DIVISIBLE) if family == "v41" else engine_config(**DIVISIBLE)
    return Small(family=family, config=config, weights=random_weights(empty_model(config).slots(), 3, packed))


def ranks(family: str, size: int, ops: str = "reference") -> list[Any]:
    one = world(family)
    return divided(one.config, one.weights, size, ops=ops)


def logits(one: Small, model: Any, prompts: Sequence[Prompt], adapted: Sequence[bool], step: int) -> list[torch.Tensor]:
    pool = AdapterPool(model)
    use = NO_ADAPTER
    if any(adapted):
        use = pool.attach("it", random_adapter(one.shapes, GROUPS, seed=5))
    uses = [use if with_it else NO_ADAPTER for with_it in adapted]
    return logits_together(one.engine(model, step=step), list(zip(prompts, uses, strict=True)))


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
@pytest.mark.parametrize(("family", "size"), CASES)
def test_logits_of_the_parts_are_those_of_the_whole_and_the_same_on_all_ranks(
    family: str, size: int, adapted: bool
) -> None:
    """Text and images in chunks; adapters of every group, routed experts included, beside a row without."""
    one = world(family)
    prompts, with_it = [one.prompt(PARTS), one.prompt([50], seed=9)], [adapted, False]
    expected = logits(one, one.model(), prompts, with_it, 64)
    found = on_all_ranks(ranks(family, size), lambda model: logits(one, model, prompts, with_it, 64))
    for rank in found:
        for ours, theirs, first in zip(rank, expected, found[0], strict=True):
            assert torch.equal(ours, first)
            assert_law(ours, theirs)


Asked = tuple[Prompt, SamplingParams]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, seed=4)


def answers(one: Small, model: Any, asked: Sequence[Asked], **options: Any) -> list[tuple[int, ...]]:
    engine = one.engine(model, **options)
    ids = [engine.add(*each) for each in asked]
    done: dict[int, RequestOutput] = {}
    while engine.has_work:
        done |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
    return [done[number].token_ids for number in ids]


@pytest.mark.parametrize(("family", "size", "ops"), [("v4", 4, "auto"), ("v4", 2, "reference"), ("v41", 2, "auto")])
def test_answers_of_the_parts_are_those_of_the_whole_whatever_the_batch(family: str, size: int, ops: str) -> None:
    """Greedy and drawn, alone and together, and with prefixes that are known."""
    one = world(family)
    asked = [(one.prompt([9], seed=1), GREEDY), (one.prompt([60], seed=2), DRAWN), (one.prompt([5, (4, 4)]), GREEDY)]
    caches = {"prefix_cache_bytes": 1 << 30, "image_cache_bytes": 1 << 30}
    expected = answers(one, one.model(), asked)

    def play(model: Any) -> list[list[tuple[int, ...]]]:
        together = answers(one, model, [*asked, *asked[::-1]], **caches)
        return [together, [answer for each in asked for answer in answers(one, model, [each])]]

    for together, alone in on_all_ranks(ranks(family, size, ops), play):
        assert alone == expected and together == [*expected, *expected[::-1]]


@pytest.mark.parametrize(("family", "size"), [("v4", 4), ("v41", 2)])
def test_rows_that_are_attended_and_experts_are_chosen_alike_on_all_ranks(family: str, size: int) -> None:
    """Bit by bit, and so is everything that ranks keep of a sequence."""
    one = world(family)
    chosen: list[list[torch.Tensor]] = [[] for _ in range(size)]

    def watched(rank: int, ops: Ops) -> Ops:
        def keep(name: str) -> Any:
            op = getattr(ops, name)

            def kept(*args: Any, **options: Any) -> Any:
                out = op(*args, **options)
                chosen[rank] += [part.clone() for part in (out if isinstance(out, tuple) else (out,))]
                return out

            return kept

        return ops.replaced(**{name: keep(name) for name in ("index_topk", "index_blocks", "router_topk")})

    def play(model: Any) -> dict[Any, torch.Tensor]:
        engine = one.engine(model)
        logits_together(engine, [(one.prompt(PARTS), NO_ADAPTER)])
        return {key: tensor.nan_to_num() for key, tensor in engine.allocator.pages.items()}

    pages = on_all_ranks(divided(one.config, one.weights, size, watched=watched), play)
    assert {kind for kind, _ in pages[0]} >= {"window", "pool", "index"} and len(chosen[0]) > 20
    for rank in range(1, size):
        assert len(chosen[rank]) == len(chosen[0])
        assert all(torch.equal(ours, first) for ours, first in zip(chosen[rank], chosen[0], strict=True))
        assert all(torch.equal(tensor, pages[0][key]) for key, tensor in pages[rank].items())
