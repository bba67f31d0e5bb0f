"""Packed picture attention against a float64 numpy definition, picture by picture."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from spyglass.errors import DeviceError
from spyglass.ops.table import describe
from spyglass.ops.vit_attention import reference, varlen
from tests.tolerance import OP_BFLOAT16, OP_FLOAT32, assert_close
from tests.vision_parts import Largest

BATCHES = [(0,), (0, 1), (0, 5, 6, 40), (0, 257), (0, 3, 3, 131)]
TOLERANCE = {torch.float32: OP_FLOAT32, torch.bfloat16: OP_BFLOAT16, torch.float64: OP_FLOAT32}


def inputs(offsets: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(offsets[-1], heads, dim, generator=generator).to(dtype) for _ in range(3)]


def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: tuple[int, ...], scale: float) -> np.ndarray:
    q64, k64, v64 = (x.double().numpy() for x in (q, k, v))
    out = np.full(v64.shape, np.nan)
    for start, stop in pairwise(offsets):
        for head in range(q.shape[1]):
            logits = scale * q64[start:stop, head] @ k64[start:stop, head].T
            weight = np.exp(logits - logits.max(axis=1, keepdims=True)) if stop > start else logits
            out[start:stop, head] = weight / weight.sum(axis=1, keepdims=True) @ v64[start:stop, head]
    return out


def cu(offsets: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offsets", BATCHES)
@pytest.mark.parametrize(("heads", "dim", "scale"), [(2, 64, 0.125), (3, 20, 0.7)])
def test_each_picture_attends_to_itself_alone(
    offsets: tuple[int, ...], heads: int, dim: int, scale: float, dtype: torch.dtype
) -> None:
    q, k, v = inputs(offsets, heads, dim, dtype)
    out = reference.vit_attention(q, k, v, cu(offsets), offsets=offsets, scale=scale)
    assert out.dtype == dtype
    assert_close(out, definition(q, k, v, offsets, scale), TOLERANCE[dtype])


def test_another_picture_full_of_nan_does_not_reach_this_one() -> None:
    q, k, v = inputs((0, 9, 20), 2, 16, torch.float32)
    for x in (q, k, v):
        x[9:] = float("nan")
    out = reference.vit_attention(q, k, v, cu((0, 9, 20)), offsets=(0, 9, 20), scale=0.25)
    assert_close(out[:9], definition(q[:9], k[:9], v[:9], (0, 9), 0.25), OP_FLOAT32)


def test_strided_thirds_of_one_projection_are_accepted() -> None:
    qkv = torch.randn(30, 3, 2, 16, generator=torch.Generator().manual_seed(3))
    q, k, v = qkv.unbind(1)
    out = reference.vit_attention(q, k, v, cu((0, 12, 30)), offsets=(0, 12, 30), scale=0.25)
    assert_close(out, definition(q, k, v, (0, 12, 30), 0.25), OP_FLOAT32)


def test_the_gradient_is_that_of_the_definition() -> None:
    q, k, v = (x.requires_grad_() for x in inputs((0, 2, 5), 1, 4, torch.float64))
    assert torch.autograd.gradcheck(
        lambda q, k, v: reference.vit_attention(q, k, v, cu((0, 2, 5)), offsets=(0, 2, 5), scale=0.5), (q, k, v)
    )


def test_memory_grows_linearly_with_the_patches() -> None:
    """No tensor of the call may be as large as patches x patches."""
    q, k, v = inputs((0, 2048), 2, 16, torch.float32)
    with torch.no_grad(), Largest() as largest:
        reference.vit_attention(q, k, v, cu((0, 2048)), offsets=(0, 2048), scale=0.25)
    assert largest.elements == 2048 * 2 * 16


def test_offsets_that_do_not_cover_the_rows_are_our_own_bug() -> None:
    q, k, v = inputs((0, 6), 1, 8, torch.float32)
    with pytest.raises(AssertionError):
        reference.vit_attention(q, k, v, cu((0, 5)), offsets=(0, 5), scale=1.0)


def test_flash_runs_in_half_precision_on_cuda_only() -> None:
    assert describe("cuda", "bfloat16")["vit_attention"] in ("triton", "varlen")  # Triton comes with some torches only
    assert describe("cuda", "float32")["vit_attention"] == "reference"
    assert not varlen.usable("cpu", "bfloat16")


@pytest.mark.parametrize("dim", [20, 264])
def test_a_head_that_flash_cannot_hold_is_refused_by_name(dim: int) -> None:
    q, k, v = inputs((0, 4), 1, dim, torch.bfloat16)
    with pytest.raises(DeviceError, match=f"this tower has {dim}"):
        varlen.vit_attention(q, k, v, cu((0, 4)), offsets=(0, 4), scale=1.0)
