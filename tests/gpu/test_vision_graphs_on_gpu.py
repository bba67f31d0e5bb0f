"""Pictures through CUDA graphs: the bits of the same layout run eagerly, whatever lies in the unused rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.batch.images import Grid, offsets
from spyglass.batch.types import ImageBatch
from spyglass.errors import DeviceError
from spyglass.layers.build import BuildContext
from spyglass.layers.linear import Linear
from spyglass.ops.rope_half import reference, triton
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16
from spyglass.vision.graphs import Budget, PaddedVision, VisionGraphs, fitting, layout_of, layout_values
from tests.tolerance import VISION_BFLOAT16, Tolerance, assert_close
from tests.vision_parts import SMALL, Vision, random_pictures, random_weights

pytestmark = pytest.mark.gpu
LADDER = [Budget(patches=size, cells=size // 6, images=6) for size in (128, 640, 1024)]
BATCHES: list[list[Grid]] = [
    [(4, 6), (1, 7), (5, 1), (3, 3), (12, 28)],
    [(28, 28)],
    [(3, 4)],
    [(20, 30), (3, 3), (9, 10)],
    [(8, 16)],
    [(16, 40)],
]


@pytest.fixture
def vision() -> Vision:
    ops = bind_ops("cuda", "bfloat16")
    return Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), torch.bfloat16, "cuda", ops)


def build(dtype: torch.dtype = torch.bfloat16) -> BuildContext:
    ops = bind_ops("cuda", str(dtype).removeprefix("torch."))
    return BuildContext(ops=ops, device=torch.device("cuda"), dtype=dtype)


def make(vision: Vision) -> VisionGraphs:
    return VisionGraphs(vision.tower, vision.aligner, build(), LADDER)


def images_of(vision: Vision, grids: list[Grid], seed: int) -> ImageBatch:
    return vision.pack(list(random_pictures(SMALL, grids, seed=seed)), grids)


def padded_eager(vision: Vision, images: ImageBatch) -> torch.Tensor:
    """The layout that a graph would use, run without one; unused rows are zero."""
    budget = fitting(LADDER, images.grids_I2, 3)
    assert budget is not None
    layout = layout_of(torch.from_numpy(layout_values(images.grids_I2, budget, 3)).cuda(), budget, 3)
    values = vision.tower.patch_values(images.patches_U)
    rows = torch.zeros(budget.patches, values.shape[1], dtype=values.dtype, device="cuda")
    rows[: len(values)] = values
    padded = PaddedVision(vision.tower, vision.aligner, LADDER[-1].patches, torch.device("cuda"))
    return padded(rows, layout, (0, budget.patches))


@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_same_layout_run_eagerly(vision: Vision) -> None:
    """Budgets and pictures change from call to call, and earlier results stay as they were."""
    graphs = make(vision)
    results = []
    for turn in range(3):
        for number, grids in enumerate(BATCHES):
            images = images_of(vision, grids, seed=10 * turn + number)
            out, expected = graphs(images), padded_eager(vision, images)[: sum_cells(grids)]
            assert torch.equal(out, expected), grids
            results.append((out, expected))
    assert all(torch.equal(out, expected) for out, expected in results)
    assert graphs.hits == 3 * len(BATCHES) and not graphs.eager
    assert len({float(out.float().sum()) for out, _ in results}) == len(results)


@torch.inference_mode()
def test_a_replay_agrees_with_the_packed_tower(vision: Vision) -> None:
    graphs = make(vision)
    for number, grids in enumerate(BATCHES):
        images = images_of(vision, grids, seed=number)
        expected = vision.aligner(vision.tower(images), images.grids_I2)
        bound = VISION_BFLOAT16.absolute * max(1.0, float(expected.abs().max()))
        assert_close(graphs(images).float(), expected.float(), Tolerance(absolute=bound, why="of the largest value"))


@torch.inference_mode()
def test_nan_in_the_unused_rows_reaches_no_picture(vision: Vision) -> None:
    graphs = make(vision)
    for number, grids in enumerate(BATCHES):
        images = images_of(vision, grids, seed=number)
        clean = graphs(images)
        graphs.patches_UF.fill_(float("nan"))
        poison = [torch.full((1 << 22,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        del poison  # memory that a kernel does not write holds NaN from here on
        assert torch.equal(graphs(images), clean), grids
        assert torch.isfinite(clean).all()


@torch.inference_mode()
def test_pixels_are_normalised_on_their_way_in(vision: Vision) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (784, 3, 14, 14), dtype=np.uint8)
    images = vision.pack([pixels], [(28, 28)])
    assert torch.equal(make(vision)(images), padded_eager(vision, images)[:100])


@torch.inference_mode()
def test_what_fits_no_graph_runs_eagerly_and_is_counted(vision: Vision) -> None:
    graphs = make(vision)
    for grids in ([(33, 33)], [(1, 1)] * 7, []):
        images = images_of(vision, grids, seed=1)
        assert torch.equal(graphs(images), vision.aligner(vision.tower(images), images.grids_I2, images.adapter_I))
    assert graphs.hits == 0
    assert dict(graphs.eager) == {"larger than the largest graph": 2, "no images": 1}


@torch.no_grad()
def test_new_weights_and_adapters_are_noticed(vision: Vision) -> None:
    graphs = make(vision)
    images = images_of(vision, BATCHES[0], seed=1)
    before = graphs(images)
    (slot,) = [slot for slot in vision.slots() if slot.name == "vision.blocks.1.mlp.w2"]
    slot.put(encode(torch.zeros(slot.shape), BF16))
    after = graphs(images)
    assert not torch.equal(after, before) and torch.equal(after, padded_eager(vision, images)[: len(after)])
    linear = next(m for m in vision.tower.modules() if isinstance(m, Linear))
    linear.adapter = lambda x, slot: torch.full((len(x), linear.out_features), 3.0, device="cuda")
    assert not torch.equal(graphs(images), after)
    assert dict(graphs.eager) == {"adapters or packed weights in the tower": 1}


def test_graphs_captured_beforehand_and_in_either_mode_are_the_same(vision: Vision) -> None:
    graphs, images = make(vision), images_of(vision, BATCHES[3], seed=1)
    graphs.prepare()
    with torch.inference_mode():
        first = graphs(images)
    with torch.no_grad():
        second = graphs(images)
    assert torch.equal(first, second) and not second.is_inference()
    graphs(images)
    assert graphs.hits == 2 and dict(graphs.eager) == {"gradients are recorded": 1}


def test_float32_has_no_graphs() -> None:
    ops = bind_ops("cuda", "float32")
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), torch.float32, "cuda", ops)
    with pytest.raises(DeviceError, match="graphs need flash attention"):
        VisionGraphs(vision.tower, vision.aligner, build(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_rotary_kernel_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    for rows, heads, dim in [(5, 3, 20), (1000, 16, 64), (1, 1, 2), (0, 2, 8)]:
        qkv = torch.randn(rows, 3, heads, dim, device="cuda").to(dtype)
        angle = torch.randn(rows, dim // 2, device="cuda")
        x = qkv[:, :2].flatten(1, 2)
        assert torch.equal(
            triton.rope_half(x, angle.cos(), angle.sin()), reference.rope_half(x, angle.cos(), angle.sin())
        )


def sum_cells(grids: list[Grid]) -> int:
    assert offsets(grids)[-1] <= LADDER[-1].patches
    return sum(-(-h // 3) * -(-w // 3) for h, w in grids)
