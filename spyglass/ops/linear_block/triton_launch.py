"""Workspaces and launches of `triton_kernel.py`; importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton

from spyglass.ops.gpu import here, interpreted
from spyglass.ops.linear_block import triton as choices
from spyglass.ops.linear_block import triton_kernel as kernels
from spyglass.quant.packed import Packed

_EXPANDED = 1024  # rows from which a weight is decoded once and multiplied as bf16


def ahead() -> bool:
    """Whether a kernel may start while the one before it ends."""
    return here().early and not interpreted()


def options() -> dict[str, Any]:
    """How a kernel is launched that waits for its inputs itself."""
    return {"launch_pdl": True} if ahead() else {}


def registers(most: int | None) -> dict[str, Any]:
    """How a kernel is launched that may use so many registers a thread."""
    return {} if most is None else {"maxnreg": most}


def multiply(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    *,
    block: int,
    groups: int,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    launch: choices.Few | choices.Many | choices.Expanded | None = None,
) -> None:
    """out [rows, groups * O] = round(x [rows, groups, I]) Wᵀ + addend + bias; `block` of the rounding, 0 without."""
    out_features, in_features = weight.shape
    rows = x.numel() // (in_features * groups)
    bits = choices.BITS[weight.format.name]
    if launch is None:
        launch = choices.measured(rows, weight, groups)
    if launch is None:
        if rows <= choices.FEW:
            launch = choices.few(rows, out_features, in_features, bits)
        elif rows < _EXPANDED:
            few = rows <= 256
            side, warps = (64, 4) if few else (128, 8)
            launch = choices.Many(rows=side, tokens=side, warps=warps, stages=4 if few else here().linear_stages)
    if isinstance(launch, choices.Few):
        _few(x, weight, out, rows, bits, block, groups, addend, bias, launch)
    elif isinstance(launch, choices.Many):
        _many(x, weight, out, rows, block, groups, addend, bias, launch)
    else:
        _expanded(x, weight, out, rows, block, groups, addend, bias)


def rounded(x: torch.Tensor, block: int, order: int) -> torch.Tensor:
    """`fake_quant` of x in blocks along its last axis, in the order that a product reads."""
    if block == 0 and order == 0:
        return x
    out = torch.empty_like(x)
    values = x.numel()
    size = 1024 if values < 1 << 20 else 4096
    kernels.round_rows[(triton.cdiv(values, size),)](
        x, out, values, BLOCK=block, SIZE=size, ORDER=order, PDL=ahead(), num_warps=size // 512, **options()
    )
    return out


def _few(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    rows: int,
    bits: int,
    block: int,
    groups: int,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    launch: choices.Few,
) -> None:
    out_features, in_features = weight.shape
    x = rounded(x, block, 0)
    data = weight.data.view(torch.int16)
    scale = data if weight.scale is None else weight.scale.view(torch.int16)
    block_n, block_k = weight.format.block or (1, 1)
    kernels.few_rows[(triton.cdiv(out_features, launch.rows),)](
        x,
        data,
        scale,
        x if addend is None else addend,
        x if bias is None else bias,
        out,
        rows,
        N=out_features,
        K=in_features,
        GROUP=out_features // groups,
        FORMAT=bits,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        ADDEND=addend is not None,
        BIAS=bias is not None,
        LARGEST=out.dtype == torch.int64,
        BN=launch.rows,
        BM=8 if rows <= 8 else 16 if rows <= 16 else 32,
        NW=launch.warps,
        STEPS=launch.steps,
        AHEAD=launch.ahead,
        PDL=ahead(),
        ASM=not interpreted(),
        num_warps=launch.warps,
        num_stages=1,
        **options(),
    )


def _many(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    rows: int,
    block: int,
    groups: int,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
    launch: choices.Many,
) -> None:
    out_features, in_features = weight.shape
    x = rounded(x, block, 80)
    assert weight.scale is not None and weight.format.block is not None
    block_n, block_k = weight.format.block
    kernels.many_rows[(out_features // launch.rows * triton.cdiv(rows, launch.tokens),)](
        x,
        weight.data.view(torch.int16),
        weight.scale.view(torch.int16),
        x if addend is None else addend,
        x if bias is None else bias,
        out,
        rows,
        N=out_features,
        K=in_features,
        GROUP=out_features // groups,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        ADDEND=addend is not None,
        BIAS=bias is not None,
        BM=launch.rows,
        BT=launch.tokens,
        NW=launch.warps,
        NS=launch.stages,
        U=launch.unrolled,
        ASM=not interpreted(),
        num_warps=launch.warps,
        num_stages=launch.stages,
        **registers(launch.registers),
    )


def expanded(weight: Packed) -> torch.Tensor:
    """An FP8 weight as bf16 numbers, exact."""
    out_features, in_features = weight.shape
    assert weight.scale is not None and weight.format.block is not None
    block_n, block_k = weight.format.block
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.data.device)
    kernels.expand_fp8[(out_features * in_features // 4096,)](
        weight.data.view(torch.int16),
        weight.scale.view(torch.int16),
        out,
        K=in_features,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SIZE=256,
        ASM=not interpreted(),
        num_warps=4,
    )
    return out


def _expanded(
    x: torch.Tensor,
    weight: Packed,
    out: torch.Tensor,
    rows: int,
    block: int,
    groups: int,
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    x_NGI = rounded(x, block, 0).view(rows, groups, -1)
    weight_GIO = expanded(weight).view(groups, -1, weight.shape[1]).mT
    plain = addend is None and bias is None and out.dtype == x.dtype
    sum_NGO = (out if plain else torch.empty(out.shape, dtype=torch.float32, device=x.device)).view(rows, groups, -1)
    for group in range(groups):
        product = sum_NGO[:, group]
        if plain:
            torch.mm(x_NGI[:, group], weight_GIO[group], out=product)
        else:
            torch.mm(x_NGI[:, group], weight_GIO[group], out_dtype=torch.float32, out=product)
    if not plain:
        sum_NO = sum_NGO.view(out.shape)
        if bias is not None:
            sum_NO += bias
        if addend is not None:
            sum_NO += addend.view(out.shape)
        out.copy_(sum_NO)


def largest(x_TI: torch.Tensor, weight: Packed, skip_O: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Place (int64) and value (fp32) of the largest output of each row that `skip_O` (bool) does not name."""
    rows, (out_features, in_features) = len(x_TI), weight.shape
    skip = skip_O.view(torch.uint8)
    launch = choices.few(rows, out_features, in_features, choices.BITS[weight.format.name])
    if rows <= choices.FEW and launch is not None:
        keys_TP = torch.empty((rows, triton.cdiv(out_features, 16)), dtype=torch.int64, device=x_TI.device)
        _few(x_TI, weight, keys_TP, rows, choices.BITS[weight.format.name], 0, 1, skip, None, launch)
    else:
        y_TO = torch.mm(x_TI, weight.data.mT, out_dtype=torch.float32)
        keys_TP = torch.empty((rows, triton.cdiv(out_features, 2048)), dtype=torch.int64, device=x_TI.device)
        kernels.largest_of_rows[(rows, keys_TP.shape[1])](y_TO, skip, keys_TP, N=out_features, SIZE=2048, num_warps=8)
    places_T = torch.empty(rows, dtype=torch.int64, device=x_TI.device)
    values_T = torch.empty(rows, dtype=torch.float32, device=x_TI.device)
    kernels.largest_of_keys[(rows,)](keys_TP, places_T, values_T, P=keys_TP.shape[1], SIZE=2048, num_warps=8)
    return places_T, values_T
