<<<<<<< HEAD
"""One launch, one read and one write; the same bits as the reference."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from spyglass.ops.rope_partial import reference

_ELEMENTS = 4096  # of one program
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def usable(device_type: str, dtype: str) -> bool:
    """Wherever Triton is."""
    return device_type == "cuda" and find_spec("triton") is not None
=======
"""One launch, one read and one write, where the reference makes eleven passes."""

from __future__ import annotations

import torch

from spyglass.ops.gpu import learns, usable
from spyglass.ops.rope_partial import reference

__all__ = ["rope_partial", "usable"]
>>>>>>> main


def rope_partial(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
<<<<<<< HEAD
    """See `reference.py`, which also serves gradients."""
    learns = torch.is_grad_enabled() and x_THD.requires_grad
    if learns or x_THD.dtype not in _DTYPES or x_THD.dim() not in (2, 3) or x_THD.stride(-1) != 1:
        return reference.rope_partial(x_THD, cos_TR, sin_TR, inverse=inverse)
    from spyglass.ops.rope_partial.triton_kernel import turn_rows

    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    rows, dim = x_THD.shape[0], x_THD.shape[-1]
    heads = x_THD.shape[1] if x_THD.dim() == 3 else 1
    if out_THD.numel():
        dims = 1 << (dim - 1).bit_length()
        at_once = min(1 << (heads - 1).bit_length(), max(1, _ELEMENTS // dims))
        turn_rows[(rows, -(-heads // at_once))](
            x_THD,
            cos_TR.contiguous(),
            sin_TR.contiguous(),
            out_THD,
            x_THD.stride(0),
            x_THD.stride(1) if x_THD.dim() == 3 else 0,
            NUM_HEADS=heads,
            DIM=dim,
            TURNED=2 * cos_TR.shape[-1],
            INVERSE=inverse,
            HEADS=at_once,
            PAIRS=dims // 2,
            num_warps=4 if at_once * dims >= 2048 else 1,
            enable_fp_fusion=False,  # products are rounded before they are added, as in the reference
        )
=======
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
>>>>>>> main
    return out_THD
