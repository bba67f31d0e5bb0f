"""One launch, one read and one write."""

from __future__ import annotations

import torch

from spyglass.ops.compress_rows import reference
from spyglass.ops.gpu import learns, overlap, usable

__all__ = ["compress_rows", "usable"]

_CHANNELS = 512  # of one program


def compress_rows(
    kv_TE: torch.Tensor, gate_TE: torch.Tensor, ape_BE: torch.Tensor | None, phase_T: torch.Tensor
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and other dtypes than fp32. A padding row needs a phase >= 0."""
    inputs = [x for x in (kv_TE, gate_TE, ape_BE) if x is not None]
    if learns(*inputs) or any(x.dtype != torch.float32 for x in inputs):
        return reference.compress_rows(kv_TE, gate_TE, ape_BE, phase_T)
    from spyglass.ops.compress_rows.triton_kernel import put_together

    kv_TE, gate_TE = (x if x.stride(-1) == 1 else x.contiguous() for x in (kv_TE, gate_TE))
    rows, width = kv_TE.shape
    out_T2E = torch.empty(rows, 2 * width, dtype=torch.float32, device=kv_TE.device)
    if out_T2E.numel():
        channels = min(1 << (width - 1).bit_length(), _CHANNELS)
        put_together[(rows, -(-width // channels))](
            *(kv_TE, gate_TE), *(kv_TE.stride(0), gate_TE.stride(0)), kv_TE if ape_BE is None else ape_BE.contiguous(),
            phase_T, out_T2E,
            WIDTH=width, BIASED=ape_BE is not None, CHANNELS=channels, num_warps=2, **overlap(kv_TE),
        )  # fmt: skip
    return out_T2E
