"""One launch, every source read once. An entry all of whose sources are absent costs nothing and is zero."""

from __future__ import annotations

import torch

from spyglass.ops import gpu
from spyglass.ops.compress_pool import reference
from spyglass.ops.gpu import learns, usable

__all__ = ["compress_pool", "usable"]

_ELEMENTS, _SOURCES = 2048, 128  # that a program reads at once; sources among them


def compress_pool(
    rows_TE: torch.Tensor,
    state_NE: torch.Tensor | None,
    sources_PB: torch.Tensor,
    *,
    overlap: bool,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and other dtypes than fp32."""
    known = [rows_TE] if state_NE is None else [rows_TE, state_NE]
    if learns(rows_TE) or any(x.dtype != torch.float32 or not x.is_contiguous() for x in known):
        return reference.compress_pool(rows_TE, state_NE, sources_PB, overlap=overlap, out_dtype=out_dtype)
    from spyglass.ops.compress_pool.triton_kernel import pool_channels

    entries, sources = sources_PB.shape
    dim = rows_TE.shape[1] // (4 if overlap else 2)
    out_PD = torch.empty(entries, dim, dtype=out_dtype, device=rows_TE.device)
    if out_PD.numel():
        at_once = min(1 << (sources - 1).bit_length(), _SOURCES)
        channels = min(max(16, 1 << (dim - 1).bit_length()), _ELEMENTS // at_once)
        pool_channels[(entries, -(-dim // channels))](
            rows_TE, rows_TE if state_NE is None else state_NE, sources_PB.contiguous(), out_PD,
            SOURCES=sources, DIM=dim, OVERLAP=overlap, AT_ONCE=at_once, CHANNELS=channels, num_warps=4,
            **gpu.overlap(rows_TE),
        )  # fmt: skip
    return out_PD
