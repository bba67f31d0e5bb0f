"""FP8 and bf16 weights on tensor cores, from the bytes as they are stored: see `triton_kernel.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops import gpu
from spyglass.ops.linear_block import cublas
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

_FEW = 32  # rows that one program multiplies with its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """A launch of `few_rows`: warps that share a sum, 16-byte loads in flight a thread and row, rows of a program."""

    warps: int
    steps: int = 4
    ahead: bool = False
    rows: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """A launch of `many_rows`: weight rows and tokens of a tile."""

    rows: int
    tokens: int
    warps: int
    stages: int
    unrolled: int = 1
    registers: int | None = None


def usable(device_type: str, dtype: str) -> bool:
    """bf16 activations wherever Triton is."""
    return dtype == "bfloat16" and gpu.usable(device_type, dtype)


def few(rows: int, out_features: int, in_features: int, bits: int) -> Few | None:
    """The launch for at most 32 rows: enough warps to fill a GPU with loads. None where a sum does not divide."""
    step = 512 // bits
    for warps, steps in ((1, 4), (2, 4), (4, 4), (8, 4), (8, 2), (4, 2), (2, 2), (1, 2), (4, 1), (2, 1), (1, 1)):
        if in_features % (warps * steps * step) == 0 and out_features * warps >= 16 * 2048:
            return Few(warps=warps, steps=steps)
    for warps, steps in ((16, 4), (16, 2), (8, 4), (8, 2), (8, 1), (4, 1), (2, 1), (1, 1)):
        if in_features % (warps * steps * step) == 0:
            return Few(warps=warps, steps=steps)
    return None


def linear_block(
    x_TI: torch.Tensor,
    weight: Packed,
    *,
    rounding: FakeQuant | None = None,
    addend_TO: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    launch: Few | Many | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves fp32 activations, gradients and odd shapes or formats."""
    rows = x_TI.numel() // x_TI.shape[-1]
    if not _suits(x_TI, weight, rounding, rows, addend_TO, bias_O):
        return cublas.linear_block(
            x_TI, weight, rounding=rounding, addend_TO=addend_TO, bias_O=bias_O, out_dtype=out_dtype
        )
    from spyglass.ops.linear_block import triton_launch

    out_TO = torch.empty(
        (*x_TI.shape[:-1], weight.shape[0]), dtype=x_TI.dtype if out_dtype is None else out_dtype, device=x_TI.device
    )
    triton_launch.multiply(
        x_TI.contiguous(),
        weight,
        out_TO,
        block=0 if rounding is None else rounding.block,
        groups=1,
        addend=None if addend_TO is None else addend_TO.contiguous(),
        bias=bias_O,
        launch=launch,
    )
    return out_TO


def _suits(
    x_TI: torch.Tensor,
    weight: Packed,
    rounding: FakeQuant | None,
    rows: int,
    addend_TO: torch.Tensor | None,
    bias_O: torch.Tensor | None,
) -> bool:
    format, (out_features, in_features) = weight.format, weight.shape
    if rows == 0 or not gpu.multiplies(x_TI.dtype) or gpu.learns(x_TI, weight.data, addend_TO, bias_O):
        return False
    if rounding is not None and (rounding.element, rounding.scale) != ("e4m3", "e8m0"):
        return False
    if format.name == "bf16":
        return rounding is None and rows <= _FEW and few(rows, out_features, in_features, 16) is not None
    if format.name != "fp8" or format.scale_dtype == "F32" or format.block is None:
        return False
    return in_features % 256 == 0 and out_features % 128 == 0
