"""One launch, one read and one write, where there were up to five."""

from __future__ import annotations

import torch

from spyglass.ops import stored, tuned
from spyglass.ops.gpu import learns, usable
from spyglass.ops.row_finish import reference
from spyglass.quant.formats import FakeQuant

__all__ = ["row_finish", "shape_key", "usable"]
_WIDEST = 1 << 12  # a row is held in registers


def row_finish(
    x_THD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    *,
    weight_D: torch.Tensor | None = None,
    eps: float | None = None,
    stepwise: bool = False,
    hadamard: bool = False,
    quant: FakeQuant | None = None,
    dims: int | None = None,
    tail_bf16: bool = False,
    pages_NBD: torch.Tensor | None = None,
    write_T: torch.Tensor | None = None,
    launch: tuned.RowWise | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients, float64 and sizes that are no powers of two."""
    dim = x_THD.shape[-1]
    dims = dim if dims is None else dims
    if learns(x_THD, weight_D) or not _suits(x_THD, cos_TR, quant, dims, pages_NBD):
        return reference.row_finish(
            x_THD,
            cos_TR,
            sin_TR,
            weight_D=weight_D,
            eps=eps,
            stepwise=stepwise,
            hadamard=hadamard,
            quant=quant,
            dims=dims,
            tail_bf16=tail_bf16,
            pages_NBD=pages_NBD,
            write_T=write_T,
        )
    from spyglass.ops.row_finish.triton_kernel import finish

    row = 0
    if pages_NBD is not None and write_T is not None and pages_NBD.dtype == torch.uint8:
        row = stored.row_code("row_finish", pages_NBD, reference.stored_row(x_THD, quant, dims))
    assert pages_NBD is None or (x_THD.dim() == 2 and pages_NBD.is_contiguous())
    heads_THD = x_THD if x_THD.dim() == 3 else x_THD[:, None]
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    finish(
        heads_THD,
        cos_TR.contiguous(),
        sin_TR.contiguous(),
        out_THD.view(heads_THD.shape),
        weight_D=weight_D,
        eps=eps,
        stepwise=stepwise,
        hadamard=hadamard,
        quant=quant,
        dims=dims,
        tail_bf16=tail_bf16,
        pages_ND=None if pages_NBD is None else pages_NBD.flatten(0, 1),
        write_T=write_T,
        row=row,
        launch=launch,
    )
    return out_THD


def shape_key(x_THD: torch.Tensor, hadamard: bool, quant: FakeQuant | None) -> dict[str, object]:
    """What a table knows the op by."""
    heads, dim = (1, x_THD.shape[-1]) if x_THD.dim() == 2 else x_THD.shape[1:]
    return {"heads": heads, "dim": dim, "hadamard": int(hadamard), "round": "no" if quant is None else quant.element}


def _suits(
    x_THD: torch.Tensor, cos_TR: torch.Tensor, quant: FakeQuant | None, dims: int, pages_NBD: torch.Tensor | None = None
) -> bool:
    dim = x_THD.shape[-1]
    if pages_NBD is not None and pages_NBD.dtype == torch.uint8:
        if not stored.suits(pages_NBD, reference.stored_row(x_THD, quant, dims), x_THD.dtype):
            return False
    powers = [dim] if quant is None else [dim, quant.block]
    fits = all(size and size & (size - 1) == 0 for size in powers) and 2 * cos_TR.shape[-1] <= dim <= _WIDEST
    whole = quant is None or (dims % quant.block == 0 and quant.block <= dim)
    return fits and whole and x_THD.stride(-1) == 1 and x_THD.dtype != torch.float64 and x_THD.dim() in (2, 3)


def suits(x_THD: torch.Tensor, cos_TR: torch.Tensor, quant: FakeQuant | None, dims: int) -> bool:
    """Whether the kernel takes these rows, tables and roundings."""
    return _suits(x_THD, cos_TR, quant, dims)
