"""All routed experts of a layer in one call: `csrc/experts.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spyglass.errors import DeviceError
from spyglass.ops import native
from spyglass.ops.build import usable
from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.ops.native import Kernels
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

__all__ = ["arguments", "experts_grouped", "usable"]


def experts_grouped(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    *,
    limit: float,
    rounding: FakeQuant | None = None,
    adapter_T: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """See `reference.py`. Each chosen expert's weights are read once; the sum over experts has a fixed order.

    Raises:
        DeviceError: an input wants a gradient, or formats, a dtype or a block size have no kernel.
    """
    native.refuse_gradient("experts_grouped", x_TC, weights_TK, w1.data, w3.data, w2.data)
    x_TC, ids_TK, weights_TK = x_TC.contiguous(), native.int32(ids_TK), native.float32(weights_TK)
    adapter_T = None if adapters is None or adapter_T is None else native.int32(adapter_T)
    out_TC = torch.empty(x_TC.shape, dtype=torch.float32)
    given = arguments(
        x_TC, ids_TK, weights_TK, w1, w3, w2, out_TC,
        limit=limit, rounding=rounding, adapter_T=adapter_T, adapters=adapters, threads=torch.get_num_threads(),
    )  # fmt: skip
    (kernels or native.best()).experts(*given)
    return out_TC


def arguments(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    out_TC: torch.Tensor,
    *,
    limit: float,
    rounding: FakeQuant | None,
    adapter_T: torch.Tensor | None,
    adapters: ExpertAdapters | None,
    threads: int,
) -> tuple[Any, ...]:
    """What the kernel takes: addresses of contiguous tensors (`out_TC` fp32), which must outlive the call.

    Raises:
        DeviceError: as `experts_grouped`.
    """
    dtype = native.dtype_code("experts_grouped", x_TC)
    if not w1.format == w3.format == w2.format:
        raise DeviceError(
            "the CPU kernel of experts_grouped needs one format for all three matrices, not "
            f"{w1.format.name}, {w3.format.name} and {w2.format.name}"
        )
    experts, width, hidden = w1.shape
    rows, chosen = ids_TK.shape
    ranks: list[ExpertRanks | None] = [None] * 3
    if adapters is None or adapter_T is None:
        adapter_T = adapters = None
    else:
        ranks = [adapters.matrices.get(matrix) for matrix in ("w1", "w3", "w2")]
    return (
        x_TC.data_ptr(), dtype, rows, chosen, ids_TK.data_ptr(), weights_TK.data_ptr(), w1.data.data_ptr(),
        w3.data.data_ptr(), w2.data.data_ptr(), native.address(w1.scale), native.address(w3.scale),
        native.address(w2.scale), experts, width, hidden, *native.weight_codes("experts_grouped", w1), limit,
        *native.quant_codes(rounding), native.address(adapter_T),
        None if adapters is None else adapters.adapter_A.data_ptr(),
        0 if adapters is None else len(adapters.adapter_A), _holds_bf16(ranks),
        *(address for each in ranks for address in _addresses(each)), out_TC.data_ptr(), threads,
    )  # fmt: skip


def _holds_bf16(ranks: Sequence[ExpertRanks | None]) -> bool:
    """Raises DeviceError where rank rows are of different dtypes, or want a gradient."""
    dtypes = set()
    for each in ranks:
        if each is not None:
            native.refuse_gradient("experts_grouped", each.a_RI, each.b_RO)
            dtypes |= {each.a_RI.dtype, each.b_RO.dtype}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        raise DeviceError(
            "the CPU kernel of experts_grouped takes adapters in float32 or in bfloat16, not "
            + " and ".join(sorted(str(dtype) for dtype in dtypes))
        )
    return dtypes == {torch.bfloat16}


def _addresses(ranks: ExpertRanks | None) -> tuple[int | None, ...]:
    if ranks is None:
        return None, None, None, None
    tensors = ranks.a_RI, ranks.b_RO, ranks.scale_R, ranks.start_AE1
    assert all(tensor.is_contiguous() for tensor in tensors)
    return tuple(tensor.data_ptr() for tensor in tensors)
