"""Tower and aligner on a GPU: the golden vectors, the host's numbers, and the laws of packing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from spyglass.batch.images import Grid
from spyglass.ops.table import bind_ops
from spyglass.vision.pixels import normalised, pixel_table
from tests.tolerance import VISION_BFLOAT16, VISION_FLOAT32, Tolerance, assert_close, assert_law
from tests.vision_parts import SMALL, Vision, random_pictures, random_weights

pytestmark = pytest.mark.gpu
CASES = (0, 1, 2, 4)
MIXED: list[Grid] = [(4, 6), (1, 7), (5, 1), (3, 3), (12, 28)]
DTYPES = {torch.float32: VISION_FLOAT32, torch.bfloat16: VISION_BFLOAT16}


def gpu_vision(dtype: torch.dtype, which: Literal["reference", "auto"] = "auto") -> Vision:
    ops = bind_ops("cuda", str(dtype).removeprefix("torch."), which)
    return Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), dtype, "cuda", ops)


@pytest.mark.parametrize("which", ["reference", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_golden_vectors_agree(golden: Path, dtype: torch.dtype, which: Literal["reference", "auto"]) -> None:
    with np.load(golden / "vision.npz") as file:
        values = dict(file)
    weights = {key.removeprefix("small.w."): value for key, value in values.items() if key.startswith("small.w.")}
    ops = bind_ops("cuda", str(dtype).removeprefix("torch."), which)
    grids: list[Grid] = [tuple(values[f"small.{case}.grid"].tolist()) for case in CASES]
    vision = Vision(SMALL, 96, weights, dtype, "cuda", ops)
    _, cells = vision.encode([values[f"small.{case}.patches"] for case in CASES], grids)
    key = "out_fp32" if dtype == torch.float32 else "out_bf16"
    assert_close(cells, np.concatenate([values[f"small.{case}.{key}"] for case in CASES]), DTYPES[dtype])


@pytest.mark.parametrize("which", ["reference", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gpu_agrees_with_the_host(dtype: torch.dtype, which: Literal["reference", "auto"]) -> None:
    patches = random_pictures(SMALL, MIXED, seed=2)
    here = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), dtype)
    # bf16 sums in another order move single steps of the residual stream: compare in units of the largest row
    expected, actual = here.encode(patches, MIXED), gpu_vision(dtype, which).encode(patches, MIXED)
    for got, want in zip(actual, expected, strict=True):
        bound = DTYPES[dtype].absolute * max(1.0, float(want.abs().max()))
        assert_close(got, want, Tolerance(absolute=bound, why="as the table, of the largest value"))


def test_packed_pictures_equal_each_alone_on_the_gpu() -> None:
    vision = gpu_vision(torch.float32)
    patches = random_pictures(SMALL, MIXED, seed=2)
    rows, cells = vision.encode(patches, MIXED)
    alone = [vision.encode([p], [grid]) for p, grid in zip(patches, MIXED, strict=True)]
    assert_law(rows, torch.cat([rows for rows, _ in alone]))
    assert_law(cells, torch.cat([cells for _, cells in alone]))


def test_flash_attention_serves_all_pictures_in_bfloat16() -> None:
    assert bind_ops("cuda", "bfloat16").chosen["vit_attention"] != "reference"


@pytest.mark.parametrize("dtype", DTYPES)
def test_pixels_become_the_reference_values_on_the_gpu(dtype: torch.dtype) -> None:
    patches = torch.arange(588).remainder(256).to(torch.uint8).view(1, 3, 14, 14)
    assert torch.equal(normalised(patches.cuda(), dtype).float().cpu(), pixel_table()[patches.long()])


@pytest.mark.parametrize("which", ["reference", "auto"])
def test_gradients_stay_inside_a_picture_on_the_gpu(which: Literal["reference", "auto"]) -> None:
    """Through either attention; the other ops are the reference, since a kernel need not have a backward."""
    attention = bind_ops("cuda", "bfloat16", which).vit_attention
    ops = bind_ops("cuda", "bfloat16", "reference").replaced(vit_attention=attention)
    vision = Vision(SMALL, 32, random_weights(SMALL, 32, seed=1), torch.bfloat16, "cuda", ops)
    images = vision.pack(list(random_pictures(SMALL, MIXED[:2], seed=2)), MIXED[:2])
    images.patches_U.requires_grad_()
    vision.tower(images)[:24].float().square().sum().backward()  # the first picture's rows
    gradient = images.patches_U.grad
    assert gradient is not None and torch.isfinite(gradient).all()
    assert (gradient[:24].abs().amax(dim=(1, 2, 3)) > 0).all() and (gradient[24:] == 0).all()


def test_memory_is_linear_in_the_patches_on_the_gpu() -> None:
    vision = gpu_vision(torch.bfloat16)
    peaks = []
    for side in (32, 64):
        patches = random_pictures(SMALL, [(side, side)], seed=2)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        vision.encode(patches, [(side, side)])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 5 * peaks[0]  # 4 x the patches
