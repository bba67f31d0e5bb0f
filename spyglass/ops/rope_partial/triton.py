"""One launch, one read and one write, where the reference makes eleven passes."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.rope_partial import reference

__all__ = ["rope_partial", "usable"]


def rope_partial(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients, float64 and numbers of pairs that are no power of two."""
    pairs = cos_TR.shape[-1]
    if learns(x_THD) or x_THD.dtype == torch.float64 or x_THD.dim() not in (2, 3) or pairs & (pairs - 1) or not pairs:
        return reference.rope_partial(x_THD, cos_TR, sin_TR, inverse=inverse)
    from spyglass.ops.rope_partial.triton_kernel import turn

    heads_THD = x_THD if x_THD.dim() == 3 else x_THD[:, None]
    if heads_THD.stride(-1) != 1:
        heads_THD = heads_THD.contiguous()
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    turn(heads_THD, cos_TR.contiguous(), sin_TR.contiguous(), out_THD.view(heads_THD.shape), inverse)
    return out_THD
