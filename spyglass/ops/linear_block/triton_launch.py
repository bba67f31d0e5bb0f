"""Workspaces and launches of `triton_kernel.py`; importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton

from spyglass.ops.gpu import generation, interpreted, roomy
from spyglass.ops.linear_block import triton as choices
from spyglass.ops.linear_block import triton_kernel as kernels
from spyglass.quant.packed import Packed

_EXPANDED = 1024  # rows from which a weight is decoded once and multiplied as bf16


def ahead() -> bool:
    """Whether a kernel may start while the one before it ends."""
    return generation() >= 90 and not interpreted()


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
    launch: choices.Few | choices.Many | None = None,
) -> None:
    """out [rows, groups * O] = round(x [rows, groups, I]) Wᵀ + addend + bias; `block` of the rounding, 0 without."""
    out_features, in_features = weight.shape
    rows = x.numel() // (in_features * groups)
    bits = 8 if weight.format.name == "fp8" else 16
    if launch is None:
        if rows <= 32:
            launch = choices.few(rows, out_features, in_features, bits)
        elif rows < _EXPANDED or groups > 1:
            launch = choices.Many(rows=128, tokens=64 if rows <= 64 else 128, warps=8, stages=4 if roomy() else 2)
    if isinstance(launch, choices.Few):
        _few(x, weight, out, rows, bits, block, groups, addend, bias, launch)
    elif launch is not None:
        _many(x, weight, out, rows, block, groups, addend, bias, launch)
    else:
        _expanded(x, weight, out, rows, block, addend, bias)


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
    addend: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    x_NI = rounded(x, block, 0).view(rows, -1)
    out_NO, weight_IO = out.view(rows, -1), expanded(weight).mT
    if addend is None and bias is None and out.dtype == x.dtype:
        torch.mm(x_NI, weight_IO, out=out_NO)
        return
    sum_NO = torch.mm(x_NI, weight_IO, out_dtype=torch.float32)
    if bias is not None:
        sum_NO += bias
    if addend is not None:
        sum_NO += addend.view(rows, -1)
    out_NO.copy_(sum_NO)
