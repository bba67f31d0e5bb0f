"""Budgets and layouts of the tower's graphs: padded = packed on the host, and when a graph may be used at all."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.batch.images import Grid, num_cells, offsets
from spyglass.batch.types import ImageBatch
from spyglass.config.model import VisionConfig
from spyglass.errors import DeviceError
from spyglass.layers.build import BuildContext
from spyglass.layers.linear import Linear
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16
from spyglass.runtime.capture import Capture
from spyglass.vision.graphs import (
    Budget,
    PaddedVision,
    VisionGraphs,
    budgets,
    fitting,
    layout_of,
    layout_values,
    leaves,
    why_not,
)
from tests.released import V4_VISION, V41_VISION
from tests.tolerance import VISION_BFLOAT16, VISION_FLOAT32, Tolerance, assert_close, assert_law
from tests.vision_parts import ODD, SMALL, Vision, random_pictures, random_weights

MIXED: list[Grid] = [(4, 6), (1, 7), (5, 1), (3, 3), (2, 8)]
SPARE = Budget(patches=90, cells=20, images=8)
TIGHT = Budget(patches=61, cells=13, images=5)  # exactly MIXED


# Budgets


def test_four_budgets_a_doubling_and_the_largest_picture() -> None:
    sizes = [budget.patches for budget in budgets(V4_VISION)]
    assert sizes == [256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3456]
    assert budgets(V41_VISION)[-1].patches == 9216
    assert [budget.patches for budget in budgets(V4_VISION, largest=600)] == [256, 320, 384, 448, 512, 600]
    assert [budget.patches for budget in budgets(V4_VISION, largest=100)] == [100]


@pytest.mark.parametrize("vision", [V4_VISION, V41_VISION], ids=["v4", "v41"])
def test_the_largest_pictures_fit_alone(vision: VisionConfig) -> None:
    ladder = budgets(vision)
    grids: list[Grid] = [(24, 138)] if vision is V4_VISION else [(60, 150), (93, 93), (3, 3063)]
    for grid in grids:
        assert fitting(ladder, [grid], 3) is not None, grid
    assert fitting(ladder, grids[:1] * 3, 3) is None


def test_a_budget_holds_many_pictures_of_the_least_size() -> None:
    for vision in (V4_VISION, V41_VISION):
        side = -(-int(vision.min_pixels**0.5) // 14)
        for budget in budgets(vision):
            count = budget.patches // side**2
            assert count == 0 or fitting([budget], [(side, side)] * count, 3) == budget


@pytest.mark.parametrize(
    ("grids", "fits"),
    [
        ([(6, 9)], True),
        ([(6, 9), (1, 1)], False),  # 55 patches
        ([(1, 12), (1, 12)], True),
        ([(1, 13), (1, 12)], False),  # 9 cells
        ([(1, 1)] * 3, True),
        ([(1, 1)] * 4, False),
    ],
)
def test_patches_cells_and_pictures_must_all_fit(grids: list[Grid], fits: bool) -> None:
    budget = Budget(patches=54, cells=8, images=3)
    assert (fitting([budget], grids, 3) is budget) is fits


def test_the_smallest_budget_that_fits_is_taken() -> None:
    ladder = [Budget(patches=size, cells=size // 6, images=4) for size in (64, 128, 256)]
    assert [fitting(ladder, [(8, side)], 3) for side in (8, 9, 16, 17, 32)] == [
        ladder[0], ladder[1], ladder[1], ladder[2], ladder[2],
    ]  # fmt: skip


# Layouts


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=4))
def test_a_layout_is_one_array_of_four_parts(pictures: list[Grid]) -> None:
    budget = Budget(patches=400, cells=50, images=6)
    layout = layout_of(torch.from_numpy(layout_values(pictures, budget, 3)), budget, 3)
    borders = list(offsets(pictures))
    assert layout.cu_seqlens_I1.tolist() == borders + [borders[-1]] * (6 - len(pictures))
    places = [(y, x) for height, width in pictures for y in range(height) for x in range(width)]
    got = list(zip(layout.row_U.tolist(), layout.column_U.tolist(), strict=True))
    assert got == places + [(0, 0)] * (400 - len(places))
    cells = sum(num_cells(grid, 3) for grid in pictures)
    assert layout.cells_I.shape == (50, 9) and (layout.cells_I[cells:] == -1).all()
    used = layout.cells_I[:cells]
    assert sorted(used[used >= 0].tolist()) == list(range(borders[-1]))
    assert all(part.dtype == torch.int32 and part.is_contiguous() for part in dataclasses.astuple(layout))


def padded_rows(
    vision: Vision, patches: list[np.ndarray], grids: list[Grid], budget: Budget, filler: float
) -> torch.Tensor:
    """What a graph computes, on the host: the unused rows are a picture of their own there, full of `filler`."""
    images = vision.pack(list(patches), grids)
    layout = layout_of(torch.from_numpy(layout_values(grids, budget, vision.config.downsample_ratio)),
                       budget, vision.config.downsample_ratio)  # fmt: skip
    last = torch.tensor([budget.patches], dtype=torch.int32)
    layout = dataclasses.replace(layout, cu_seqlens_I1=torch.cat([layout.cu_seqlens_I1, last]))
    module = PaddedVision(vision.tower, vision.aligner, budget.patches, torch.device("cpu"))
    values = vision.tower.patch_values(images.patches_U)
    rows = torch.full((budget.patches, values.shape[1]), filler, dtype=values.dtype)
    rows[: len(values)] = values
    with torch.no_grad():
        out = module(rows, layout, tuple(layout.cu_seqlens_I1.tolist()))
    assert out.shape == (budget.cells, vision.aligner.w2.out_features)
    return out


@pytest.mark.parametrize("filler", [0.0, 1e30, float("nan")])
@pytest.mark.parametrize("budget", [SPARE, TIGHT], ids=["spare", "tight"])
def test_padded_equals_packed_whatever_the_unused_rows_hold(budget: Budget, filler: float) -> None:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    patches = random_pictures(SMALL, MIXED, seed=2)
    _, cells = vision.encode(patches, MIXED)
    padded = padded_rows(vision, patches, MIXED, budget, filler)
    assert len(cells) == TIGHT.cells
    assert_law(padded[: len(cells)], cells)
    nothing = vision.aligner.project(torch.zeros(1, vision.aligner.w1.in_features))
    assert_close(padded[len(cells) :], nothing.detach().expand(budget.cells - len(cells), -1), VISION_FLOAT32)


def test_padded_equals_packed_for_another_config() -> None:
    grids: list[Grid] = [(5, 7), (2, 2), (1, 3)]
    vision = Vision(ODD, 24, random_weights(ODD, 24, seed=1))
    patches = random_pictures(ODD, grids, seed=2)
    _, cells = vision.encode(patches, grids)
    budget = Budget(patches=60, cells=20, images=4)
    assert_law(padded_rows(vision, patches, grids, budget, float("nan"))[: len(cells)], cells)


# When a graph may be used


def build(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, attention: str = "varlen") -> BuildContext:
    ops = bind_ops("cpu", "float32", "reference")
    chosen = {**ops.chosen, "vit_attention": attention}
    return BuildContext(ops=ops.replaced(chosen), device=torch.device(device), dtype=dtype)


def test_graphs_need_cuda_and_an_attention_that_asks_the_host_nothing() -> None:
    assert "CUDA device, this is cpu" in str(why_not(build()))
    assert "not reference" in str(why_not(build("cuda", attention="reference")))
    assert why_not(build("cuda")) is None
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1))
    with pytest.raises(DeviceError, match=r"vision_graphs='on'.*use 'auto' or 'off'"):
        VisionGraphs(vision.tower, vision.aligner, build())


class HostGraphs(VisionGraphs):
    """The rules without a GPU: a replay is the padded form, run eagerly."""

    def __init__(self, vision: Vision, ladder: Sequence[Budget]) -> None:
        self.hits, self.captures = 0, 0
        self.eager = Counter()
        self.vision = vision
        self._tower, self._aligner, self.ladder = vision.tower, vision.aligner, tuple(ladder)
        self._leaves = leaves(vision.tower, vision.aligner)
        self.capture = Capture("eager")
        self.captured: set[tuple[int, ...]] = set()

    def _replay(self, budget: Budget, images: ImageBatch) -> torch.Tensor:
        self.captured.add(tuple(id(held) for held in self._weights))
        self.captures = len(self.captured)
        pictures = [part.numpy() for part in images.patches_U.split([h * w for h, w in images.grids_I2])]
        cells = sum(num_cells(grid, 3) for grid in images.grids_I2)
        return padded_rows(self.vision, pictures, list(images.grids_I2), budget, float("nan"))[:cells]


@pytest.fixture
def host() -> HostGraphs:
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), torch.bfloat16)
    return HostGraphs(vision, [SPARE])


def images_of(host: HostGraphs, grids: list[Grid]) -> tuple[ImageBatch, torch.Tensor]:
    patches = random_pictures(SMALL, grids, seed=2)
    return host.vision.pack(list(patches), grids), host.vision.encode(patches, grids)[1]


@torch.no_grad()
def test_what_fits_is_replayed_and_what_does_not_runs_eagerly_and_is_counted(host: HostGraphs) -> None:
    for grids in (MIXED, MIXED[:1], [(10, 10)], [(1, 1)] * 9, []):
        images, expected = images_of(host, grids)
        scale = max(1.0, float(expected.abs().max())) if len(expected) else 1.0
        assert_close(host(images), expected, Tolerance(absolute=VISION_BFLOAT16.absolute * scale, why="of the largest"))
    assert host.hits == 2 and host.captures == 1
    assert dict(host.eager) == {"larger than the largest graph": 2, "no images": 1}


def test_where_gradients_are_recorded_nothing_is_replayed(host: HostGraphs) -> None:
    images, _ = images_of(host, MIXED)
    host(images)
    assert host.hits == 0 and dict(host.eager) == {"gradients are recorded": 1}


@torch.no_grad()
def test_an_adapter_is_never_skipped(host: HostGraphs) -> None:
    images, expected = images_of(host, MIXED)
    host(images)
    linear = next(m for m in host.vision.tower.modules() if isinstance(m, Linear))
    linear.adapter = lambda x, slot: torch.full((len(x), linear.out_features), 3.0)
    assert (host(images) - expected).abs().max() > 0.1
    assert host.hits == 1 and dict(host.eager) == {"adapters or packed weights in the tower": 1}


@torch.no_grad()
@pytest.mark.parametrize("name", ["vision.blocks.1.mlp.w2", "vision.blocks.0.norm2.weight", "aligner.w2.bias"])
def test_replaced_weights_are_captured_again(host: HostGraphs, name: str) -> None:
    images, _ = images_of(host, MIXED)
    host(images)
    host(images)
    assert host.captures == 1
    (slot,) = [slot for slot in host.vision.slots() if slot.name == name]
    slot.put(encode(torch.zeros(slot.shape), BF16))
    host(images)
    host(images)
    assert host.captures == 2 and host.hits == 4
