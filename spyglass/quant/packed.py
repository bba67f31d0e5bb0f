"""A weight as it lies in memory: its format and its one or two tensors."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spyglass.quant.formats import Format

# safetensors dtype -> the dtype it has in memory
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # raw bytes: a numeric cast would destroy the exponents
    "I8": torch.uint8,  # two FP4 codes a byte
    "U8": torch.uint8,
    "I64": torch.int64,
}
_LARGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """`data` [..., out, in] in storage form (uint8 for fp4, float8_e4m3fn for fp8); `scale` uint8 bytes of e8m0, or
    float32. `shape` is the logical shape. Leading axes (experts) are stacked. `tiled`: the bytes of every matrix lie in
    the order of `quant/tiles.py`, not in a file's.
    """

    format: Format
    data: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, ...]
    tiled: bool = False

    def __getitem__(self, index: int) -> Packed:
        """Matrix `index` of a stack (one expert)."""
        scale = None if self.scale is None else self.scale[index]
        return Packed(self.format, self.data[index], scale, self.shape[1:], self.tiled)

    def rows(self, start: int, stop: int) -> Packed:
        """Rows of a matrix, where they lie; `start` begins a block of scales, `stop` ends one or the matrix."""
        block = 1 if self.format.block is None else self.format.block[0]
        assert not self.tiled and len(self.shape) == 2 and start % block == 0
        scale = None if self.scale is None else self.scale[start // block : -(-stop // block)]
        return Packed(self.format, self.data[start:stop], scale, (stop - start, self.shape[1]))


def empty_packed(format: Format, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Packed:
    """Memory for a weight or a stack of weights of logical `shape`, not yet written."""
    dtype = TORCH_DTYPES[format.weight_dtype]
    data = in_large_pages(torch.empty(format.storage_shape(shape), dtype=dtype, device=device))
    scale_shape = format.scale_shape(shape)
    if scale_shape is None or format.scale_dtype is None:
        return Packed(format, data, None, shape)
    scale = torch.empty(scale_shape, dtype=TORCH_DTYPES[format.scale_dtype], device=device)
    return Packed(format, data, scale, shape)


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, whose memory shall come in pages of 2 MiB, where it is large, on the CPU and not yet written.

    A step reads every weight once, so that with pages of 4 KiB it looks up as many addresses as it reads pages.
    """
    first = -(-tensor.data_ptr() // _LARGE_PAGE) * _LARGE_PAGE
    size = tensor.data_ptr() + tensor.nbytes - first
    if tensor.is_cpu and size >= _LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        madvise = ctypes.CDLL(None).madvise  # a system without such pages says no, and nothing is lost
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(size // _LARGE_PAGE * _LARGE_PAGE), mmap.MADV_HUGEPAGE)
    return tensor


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One place of the model that a checkpoint tensor fills: the seam between `checkpoint` and the modules.

    `name` is the native checkpoint name without `.weight`/`.scale` for matrices (`layers.3.attn.wq_a`), or the full
    name for plain tensors (`layers.3.attn.attn_sink`). `put` takes the tensor(s) over; it may copy into a stack
    (experts). `kind`: "matrix" may be any Format, "vector" is bf16/f32 data without scale, "index" is int64 (tid2eid).
    An `optional` slot may stay unfilled: the checkpoint need not have its tensor (`gate.bias` of a hash layer).
    `place` may offer host memory for a weight of the given format (see `empty_packed`): the file is then read straight
    into it, and `put` gets the same tensors back.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    put: Callable[[Packed], None]
    optional: bool = False
    place: Callable[[Format], Packed | None] | None = None
