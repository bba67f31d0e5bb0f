"""The routed experts of V4, tiled as they are on a GPU, with adapters and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.quant.formats import FP4, FakeQuant
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta

A8 = FakeQuant(element="e4m3", block=128)
_HELD_IN = {1: torch.bfloat16, 128: torch.float32, 2048: torch.bfloat16}  # adapters, by rows of a step


def launches() -> Iterator[Launch]:
    shapes = ((2048, 4096), (2048, 4096), (4096, 2048))
    stacks = [replace(empty_packed(FP4, (256, *shape), "meta"), tiled=True) for shape in shapes]
    options = {"limit": 10.0, "rounding": A8}
    for rows in (1, 8, 32, 128, 2048):
        ids, weights = meta(rows, 6, dtype=torch.int32), meta(rows, 6, dtype=torch.float32)
        args = (meta(rows, 4096), ids, weights, *stacks)
        yield Launch(args=args, options=options)
        if rows in _HELD_IN:
            dtype = _HELD_IN[rows]
            more = {"adapter_T": meta(rows, dtype=torch.int32), "adapters": _adapters(dtype)}
            yield Launch(args=args, options=options | more)


def _adapters(dtype: torch.dtype) -> ExpertAdapters:
    """Two of rank 16 for all matrices."""
    matrices = {}
    for name, (outer, inner) in {"w1": (2048, 4096), "w3": (2048, 4096), "w2": (4096, 2048)}.items():
        total = 2 * 256 * 16
        matrices[name] = ExpertRanks(
            meta(total, inner, dtype=dtype),
            meta(total, outer, dtype=dtype),
            meta(total, dtype=torch.float32),
            meta(2, 257, dtype=torch.int32),
            ((16,) * 256,) * 2,
        )
    return ExpertAdapters(meta(2, dtype=torch.int32), matrices)


def train() -> None:
    """What a training step launches around its products."""
    from spyglass.ops.experts_grouped import triton_training as kernels

    ids, fp32 = torch.int64, torch.float32
    for rounding in (A8, None):
        kernels.spread_rows(meta(4096, 4096), meta(9000, dtype=ids), meta(9000, 4096), meta(9000, 4288), rounding)
        kernels.gate_rows(
            *(meta(9000, 2048), meta(9000, 2048), meta(24576, dtype=fp32), meta(9000, dtype=ids), 10.0),
            *(meta(9000, 2048), meta(9000, 2144), rounding),
        )
    kernels.spread_rows(meta(4096, 4096), meta(9000, dtype=ids), meta(9000, 4096), None, None)
    for out in (torch.bfloat16, fp32):
        kernels.sum_rows(meta(9000, 4096), meta(4096, 6, dtype=ids), meta(4096, 4096, dtype=out))
    both = meta(9000, 4096)
    for weight, dweight in ((meta(24576, dtype=fp32), meta(9000, dtype=fp32)), (None, None)):
        kernels.gate_gradient(
            *(meta(9000, 2048), meta(9000, 2048), weight, meta(9000, dtype=ids), 10.0, meta(9000, 2048)),
            *(both[:, :2048], both[:, 2048:], dweight),
        )
