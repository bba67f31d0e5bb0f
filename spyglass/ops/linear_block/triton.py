"""FP8 and bf16 weights on tensor cores, from the bytes as they are stored: see `triton_kernel.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops import gpu, tuned
from spyglass.ops.linear_block import cublas
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

CAPABILITIES = frozenset({"capturable", "rounds_apart"})
FEW = 32  # rows that one program multiplies with its weights
BITS = {"fp8": 8, "bf16": 16}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """An FP8 weight decoded once and multiplied as bf16."""


def usable(device_type: str, dtype: str) -> bool:
    """bf16 activations wherever Triton is."""
    return dtype == "bfloat16" and gpu.usable(device_type, dtype)


def few(rows: int, out_features: int, in_features: int, bits: int) -> Few | None:
    """The launch for at most 32 rows: enough warps to fill a GPU with loads. None where a sum does not divide."""
    warps, steps = (1 if out_features >= 1 << 14 else 8), 4
    while in_features % (warps * steps * 512 // bits):
        if warps == steps == 1:
            return None
        warps, steps = (warps // 2, steps) if warps > 1 else (1, steps // 2)
    # more rows are read as often as there are programs, from the second-level cache
    wide = rows > 16 and out_features >= 1 << 12 and out_features % 32 == 0
    return Few(warps=warps, steps=steps, ahead=rows <= 8, rows=32 if wide else 16)


def measured(rows: int, weight: Packed, groups: int) -> Few | Many | Expanded | None:
    """The launch that a table of this GPU names."""
    found: Few | Many | Expanded | None
    found = tuned.find("linear_block", (Few, Many, Expanded), rows, **shape_key(weight, groups))
    return found


def shape_key(weight: Packed, groups: int) -> dict[str, object]:
    """What a table knows a linear map by."""
    block = "x".join(map(str, weight.format.block or ()))
    return {"weight": f"{weight.format.name}{block}", "out": weight.shape[0], "in": weight.shape[1], "groups": groups}


def linear_block(
    x_TI: torch.Tensor,
    weight: Packed,
    *,
    rounding: FakeQuant | None = None,
    addend_TO: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    launch: Few | Many | Expanded | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves fp32 activations, gradients and odd shapes or formats."""
    rows = x_TI.numel() // x_TI.shape[-1]
    if not suits(x_TI, weight, rounding, rows) or gpu.learns(x_TI, weight.data, addend_TO, bias_O):
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


def suits(x: torch.Tensor, weight: Packed, rounding: FakeQuant | None, rows: int, groups: int = 1) -> bool:
    """Whether the kernels take these dtypes, formats and shapes."""
    format, (out_features, in_features) = weight.format, weight.shape
    if rows == 0 or not gpu.multiplies(x.dtype) or (out_features // groups) % 16 or format.scale_dtype == "F32":
        return False
    if rounding is not None and (rounding.element, rounding.scale) != ("e4m3", "e8m0"):
        return False
    if rows <= FEW and format.name in BITS and few(rows, out_features, in_features, BITS[format.name]) is None:
        return False
    if format.name == "bf16":
        return rounding is None and rows <= FEW
    if format.name != "fp8" or format.block is None:
        return False
    even = (in_features // format.block[1]) % 2 == 0 and in_features % format.block[1] == 0
    return even and in_features % 128 == 0 and (rows <= FEW or (out_features // groups) % 128 == 0)
