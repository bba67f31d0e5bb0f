"""Weight formats: how a logical [out, in] matrix lies on disk and in memory. Torch-free; `codec.py` has the arithmetic.

Spec v4 2.4: e8m0 byte u = 2^(u-127) (255 is NaN); e4m3 weights carry one scale per `block`; e2m1 weights are packed two
to a byte, low nibble first, with one scale per row and 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One storage format. `block` is (rows, columns) per scale; None = no scale."""

    name: Literal["bf16", "f32", "fp8", "fp4", "i64"]
    weight_dtype: str  # safetensors dtype of `.weight`
    scale_dtype: str | None  # safetensors dtype of `.scale`
    bits: int
    block: tuple[int, int] | None

    def __str__(self) -> str:
        if self.block is None:
            return self.name
        scales = " with f32 scales" if self.scale_dtype == "F32" else ""
        return f"{self.name} {self.block[0]}x{self.block[1]}{scales}"

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored weight for a logical shape."""
        return (*shape[:-1], shape[-1] // 2) if self.name == "fp4" else shape

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Shape of the stored scale for a logical [..., out, in] shape; None without scales."""
        if self.block is None:
            return None
        rows, columns = self.block
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))


BF16 = Format(name="bf16", weight_dtype="BF16", scale_dtype=None, bits=16, block=None)
F32 = Format(name="f32", weight_dtype="F32", scale_dtype=None, bits=32, block=None)
I64 = Format(name="i64", weight_dtype="I64", scale_dtype=None, bits=64, block=None)
FP4 = Format(name="fp4", weight_dtype="I8", scale_dtype="F8_E8M0", bits=4, block=(1, 32))


def fp8(block: tuple[int, int], scale_dtype: str = "F8_E8M0") -> Format:
    """E4m3 with one scale per block: (128, 128) in V4, (32, 32) in V4.1; base models use F32 scales."""
    return Format(name="fp8", weight_dtype="F8_E4M3", scale_dtype=scale_dtype, bits=8, block=block)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeQuant:
    """Quantise-dequantise along the last axis in blocks (spec v4 2.5, v41 4.1)."""

    element: Literal["e4m3", "e2m1"]
    block: int
    scale: Literal["e8m0", "e4m3"] = "e8m0"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A row of the cache as the model rounds it: codes of its first `dims` channels, the others as bf16, then a scale
    byte per block, filled up to a multiple of 4 bytes. `rows.py` has the arithmetic.

    Two e2m1 codes share a byte, low nibble first. V4's rows of 512 channels take 448 + 128 + 7 + 1 = 584 bytes.
    In bytes: `tail_at`, where the bf16 channels begin, an even place behind the codes; `scales_at`, where the scales
    begin; `row_bytes`. `blocks`: scales of a row; the last block may be shorter.
    """

    quant: FakeQuant
    dim: int
    dims: int
    tail_at: int = field(init=False)
    scales_at: int = field(init=False)
    blocks: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        codes = self.dims if self.quant.element == "e4m3" else -(-self.dims // 2)
        tail, blocks = codes + codes % 2, -(-self.dims // self.quant.block)
        scales = tail + 2 * (self.dim - self.dims)
        found = {"tail_at": tail, "scales_at": scales, "blocks": blocks, "row_bytes": -(-(scales + blocks) // 4) * 4}
        for name, value in found.items():
            object.__setattr__(self, name, value)
