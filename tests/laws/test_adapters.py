"""Adapters: the model with one is the model whose weights were merged with it, and nobody notices another's.

The dense-merged model (fp32, plain numerics) is the oracle for every group of modules, in both families.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.pool import AdapterPool
from spyglass.lora.use import NO_ADAPTER
from spyglass.ops.build import why_not
from spyglass.ops.table import bind_ops
from spyglass.params.targets import GROUPS
from spyglass.prompt.tokens import Prompt
from tests.adapter_parts import Small, logits_together, merged, random_adapter, small
from tests.tolerance import LAW_OF_MAX, assert_law, assert_merged

FAMILIES = ["v4", "v41"]
SHAPE: list[int | tuple[int, int]] = [3, (4, 4), 5, (3, 5), 30]


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest) -> Small:
    return small(request.param, seed=7)


@pytest.fixture(scope="module")
def prompt(world: Small) -> Prompt:
    return world.prompt(SHAPE)


@pytest.fixture(scope="module")
def base(world: Small, prompt: Prompt) -> torch.Tensor:
    return run(world, world.model(), prompt)


def run(world: Small, model: Any, prompt: Prompt, adapter: AdapterFile | None = None, **options: Any) -> torch.Tensor:
    """Logits of one request with an adapter that is attached for it and taken out again."""
    pool = AdapterPool(model)
    use = NO_ADAPTER if adapter is None else pool.attach("it", adapter, **options)
    (out,) = logits_together(world.engine(model), [(prompt, use)])
    if adapter is not None:
        pool.detach("it")
    return out


def groups_of(world: Small) -> Iterator[str]:
    """The groups that this family has."""
    yield from (group for group in GROUPS if group != "engram" or world.family == "v41")


def moved(logits: torch.Tensor, base: torch.Tensor) -> bool:
    return bool((logits - base).abs().max() > 100 * LAW_OF_MAX * base.abs().max())


def test_an_adapter_of_any_group_equals_the_merged_model(world: Small, prompt: Prompt, base: torch.Tensor) -> None:
    model = world.model()
    for group in groups_of(world):
        adapter = random_adapter(world.shapes, [group], rank=3, seed=1)
        live = run(world, model, prompt, adapter)
        assert_merged(live, run(world, world.model(merged(world.weights, adapter)), prompt), group)
        assert moved(live, base), f"{group} does nothing"
    assert torch.equal(run(world, model, prompt), base), "detached: as if there had never been one"


@pytest.mark.parametrize("rank", [1, 4, 8, 16, 64, 256])
def test_an_adapter_of_any_rank_equals_the_merged_model(world: Small, prompt: Prompt, rank: int) -> None:
    adapter = random_adapter(world.shapes, groups_of(world), rank=rank, seed=2)
    live = run(world, world.model(), prompt, adapter)
    assert_merged(live, run(world, world.model(merged(world.weights, adapter)), prompt), f"rank {rank}")


def test_factor_and_rslora_scale_what_is_added(world: Small, prompt: Prompt, base: torch.Tensor) -> None:
    model = world.model()
    adapter = random_adapter(world.shapes, ["attention", "experts", "aligner"], rank=4, rslora=True, seed=3)
    whole = run(world, model, prompt, adapter)
    for factor in (1.0, 0.5, -1.0):
        expected = run(world, world.model(merged(world.weights, adapter, factor)), prompt)
        live = run(world, model, prompt, adapter, factor=factor)
        assert_merged(live, expected, f"factor {factor}")
        assert factor == 1.0 or moved(live, whole)


def test_requests_with_different_adapters_run_together_as_they_run_alone(world: Small, base: torch.Tensor) -> None:
    """Ranks differ, one adapter only sees, one only reads, and some requests have none; alone: no other is attached."""
    model = world.model()
    adapters = [
        random_adapter(world.shapes, groups_of(world), rank=5, seed=4),
        random_adapter(world.shapes, ["tower", "aligner"], rank=2, seed=5),
        random_adapter(world.shapes, ["experts", "shared"], rank=1, seed=6),
        None,
    ]
    asked = [(world.prompt(SHAPE, number % 2), adapter) for number, adapter in enumerate([*adapters, *adapters[::-1]])]
    alone = [run(world, model, prompt, adapter) for prompt, adapter in asked]
    pool = AdapterPool(model)
    uses = [NO_ADAPTER if a is None else pool.attach(str(number), a) for number, a in enumerate(adapters)]
    requests = [(prompt, use) for (prompt, _), use in zip(asked, [*uses, *uses[::-1]], strict=True)]
    for step in (512, 45):
        together = logits_together(world.engine(model, step=step), requests)
        for number, logits in enumerate(together):
            assert_law(logits, alone[number], f"request {number} at {step} tokens a step")
    assert moved(together[0], together[4]) and moved(together[1], together[3])


def test_in_bf16_too_mixed_is_alone_within_what_bf16_rounds_away(world: Small) -> None:
    """The bound is the distance of the same logits from those in fp32."""
    adapters = [random_adapter(world.shapes, groups_of(world), rank=rank, seed=rank) for rank in (2, 6)]
    alone: dict[torch.dtype, list[torch.Tensor]] = {}
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = world.model(dtype=dtype)
        pool = AdapterPool(model)
        uses = [NO_ADAPTER, *(pool.attach(str(number), adapter) for number, adapter in enumerate(adapters))]
        requests = [(world.prompt(SHAPE, seed), use) for seed, use in enumerate(uses)]
        together[dtype] = logits_together(world.engine(model, step=512), requests)
        alone[dtype] = [logits_together(world.engine(model, step=512), [request])[0] for request in requests]
    for number, (mixed, single) in enumerate(zip(together[torch.bfloat16], alone[torch.bfloat16], strict=True)):
        noise = (single - alone[torch.float32][number]).abs().mean()
        assert (mixed - single).abs().mean() <= 0.5 * noise, f"request {number}"


def places() -> list[Any]:
    """(ops, dtype): the defining ops, and the CPU kernels where they are built."""
    absent = why_not()
    skip = pytest.mark.skipif(absent is not None, reason=str(absent))
    return [
        ("reference", torch.float32),
        *(pytest.param(("auto", t), marks=skip) for t in (torch.float32, torch.bfloat16)),
    ]


@pytest.mark.parametrize("place", places(), ids=str)
def test_rows_without_adapter_are_bit_equal_whoever_else_is_in_the_step(world: Small, place: Any) -> None:
    """Packed weights and released roundings; the same step with adapters attached and in use beside it, and without."""
    ops, dtype = place
    packed = small(world.family, seed=7, packed=True)
    model = packed.model(
        dtype=dtype,
        numerics="reference",
        expand=False,
        ops=bind_ops("cpu", str(dtype).removeprefix("torch."), ops),
    )
    prompts = [packed.prompt(SHAPE, seed) for seed in range(3)]
    before = logits_together(packed.engine(model, step=512), [(prompt, NO_ADAPTER) for prompt in prompts])
    pool = AdapterPool(model)
    use = pool.attach("all", random_adapter(packed.shapes, groups_of(packed), rank=4, seed=8))
    idle = logits_together(packed.engine(model, step=512), [(prompt, NO_ADAPTER) for prompt in prompts])
    mixed = logits_together(
        packed.engine(model, step=512), list(zip(prompts, [NO_ADAPTER, use, NO_ADAPTER], strict=True))
    )
    for number in range(3):
        assert torch.equal(idle[number], before[number])
    assert torch.equal(mixed[0], before[0]) and torch.equal(mixed[2], before[2])
    assert moved(mixed[1], before[1]) and torch.isfinite(mixed[1]).all()


def test_base_and_adapters_in_turn_leave_no_trace(world: Small, prompt: Prompt, base: torch.Tensor) -> None:
    """base, A, base, B, base in one engine: the three base replies are identical bits."""
    model = world.model()
    pool, engine = AdapterPool(model), world.engine(model)
    a = pool.attach("a", random_adapter(world.shapes, ["experts"], rank=4, seed=9))
    b = pool.attach("b", random_adapter(world.shapes, ["experts", "attention", "tower"], rank=16, seed=10))
    replies = [logits_together(engine, [(prompt, use)])[0] for use in (NO_ADAPTER, a, NO_ADAPTER, b, NO_ADAPTER)]
    assert all(torch.equal(reply, base) for reply in replies[::2])
    assert moved(replies[1], base) and moved(replies[3], base) and moved(replies[1], replies[3])


@pytest.mark.parametrize("place", places(), ids=str)
def test_an_adapter_of_zeros_gives_exactly_the_base(world: Small, prompt: Prompt, place: Any) -> None:
    """B = 0, as before the first step of training, or A = 0; plain numerics, where the order of a sum shows."""
    ops, dtype = place
    model = world.model(dtype=dtype, ops=bind_ops("cpu", str(dtype).removeprefix("torch."), ops))
    base = run(world, model, prompt)
    adapter = random_adapter(world.shapes, groups_of(world), rank=4, size=0.0)
    assert torch.equal(run(world, model, prompt, adapter), base)
    full = random_adapter(world.shapes, groups_of(world), rank=4)
    none = {name: dataclasses.replace(pair, a_RI=torch.zeros_like(pair.a_RI)) for name, pair in full.modules.items()}
    assert torch.equal(run(world, model, prompt, AdapterFile(modules=none)), base)
    assert moved(run(world, model, prompt, full), base)
