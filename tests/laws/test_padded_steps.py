"""A step in a frame with room to spare gives the bits of the step itself, whatever is in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.lora.pool import AdapterPool
from spyglass.lora.use import NO_ADAPTER
from spyglass.runtime.frame import Frame, Frames, FrameShape, Pages
from spyglass.runtime.step_input import StepInput
from tests.adapter_parts import Small, logits_together, random_adapter, small
from tests.small_models import ops_of

SHAPES: list[list[int | tuple[int, int]]] = [[3, (4, 4), 5, (3, 5), 30], [140], [2], [9, (2, 3), 1]]
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@pytest.fixture(scope="module", params=["v4", "v41"])
def world(request: pytest.FixtureRequest) -> Small:
    return small(request.param, seed=7, packed=True)


def bucketed(shape: FrameShape) -> FrameShape:
    """Every number rounded up to the next bucket."""
    return grown(shape, lambda number: next(bucket for bucket in BUCKETS if bucket >= number))


def roomy(shape: FrameShape) -> FrameShape:
    """Much more room. The CPU kernels have ways of their own for up to 8 rows and up to 64, with other last bits."""
    return grown(shape, lambda number: 8 if number <= 8 else 64 if number <= 64 else 2 * number + 3)


def grown(shape: FrameShape, more: Any) -> FrameShape:
    def pools(group: str, width: int) -> int:
        return more(width) if group.startswith("pool") else width

    return replace(
        shape,
        rows=more(shape.rows),
        sequences=more(shape.sequences),
        logit_rows=more(max(1, shape.logit_rows)),
        window_width=more(shape.window_width),
        closing=tuple((ratio, more(max(1, count))) for ratio, count in shape.closing),
        visible=tuple((ratio, more(max(1, count))) for ratio, count in shape.visible),
        table_widths=tuple((group, pools(group, width)) for group, width in shape.table_widths),
        adapters=True,
    )


def answers(world: Small, adapters: bool) -> list[torch.Tensor]:
    """Logits of several requests that run together, in chunks."""
    model = world.model(ops=ops_of(("cpu", "auto")), expand=False)
    pool = AdapterPool(model)
    uses = [NO_ADAPTER] * len(SHAPES)
    if adapters:
        file = random_adapter(world.shapes, ["attention", "experts", "shared"], rank=3, seed=1)
        uses[0] = uses[2] = pool.attach("one", file)
        uses[1] = pool.attach("two", random_adapter(world.shapes, ["attention"], rank=2, seed=2))
    prompts = [world.prompt(shape) for shape in SHAPES]
    return logits_together(world.engine(model), list(zip(prompts, uses, strict=True)))


@pytest.mark.parametrize("adapters", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("room", [bucketed, roomy])
def test_a_padded_step_equals_the_exact_step(
    world: Small, room: Any, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(world, adapters)
    shapes: list[FrameShape] = []

    def padded(self: Frames, step: StepInput, pages: Pages, _: FrameShape | None = None) -> Frame:
        shapes.append(room(self.shape_of(step)))
        return fill(self, step, pages, shapes[-1])

    fill = Frames.fill
    monkeypatch.setattr(Frames, "exact", padded)
    monkeypatch.setattr(Frames, "fill", padded)
    got = answers(world, adapters)
    assert len(shapes) > 3 and any(shape.images for shape in shapes)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs), np.flatnonzero((mine != theirs).any(dim=-1).numpy())
