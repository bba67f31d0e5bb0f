"""A weight as it lies in memory: its format and its one or two tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spyglass.quant.formats import Format


@dataclass(frozen=True, slots=True)
class Packed:
    """`data` [..., out, in] in storage form (uint8 for fp4, float8_e4m3fn for fp8); `scale` uint8 bytes of e8m0, or
    float32. `shape` is the logical shape. Leading axes (experts) are stacked.
    """

    format: Format
    data: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, ...]

    def __getitem__(self, index: int) -> Packed:
        """Matrix `index` of a stack (one expert)."""
        scale = None if self.scale is None else self.scale[index]
        return Packed(self.format, self.data[index], scale, self.shape[1:])


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """One place of the model that a checkpoint tensor fills: the seam between `checkpoint` and the modules.

    `name` is the native checkpoint name without `.weight`/`.scale` for matrices (`layers.3.attn.wq_a`), or the full
    name for plain tensors (`layers.3.attn.attn_sink`). `put` takes the tensor(s) over; it may copy into a stack
    (experts). `kind`: "matrix" may be any Format, "vector" is bf16/f32 data without scale, "index" is int64 (tid2eid).
    An `optional` slot may stay unfilled: the checkpoint need not have its tensor (`gate.bias` of a hash layer).
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    put: Callable[[Packed], None]
    optional: bool = False
