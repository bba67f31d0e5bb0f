"""Workspaces and launches of `triton_kernel.py`; importing it needs Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import triton

from spyglass.ops.gpu import here, interpreted
from spyglass.ops.linear_block import triton as choices
from spyglass.ops.linear_block import triton_kernel as kernels
from spyglass.ops.linear_merged.reference import MapStack
from spyglass.quant.packed import Packed

_FEW_LARGEST = 8  # rows up to which the head is read once for its argmax alone; more are quicker by its logits
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
            launch = _tiles(rows)
    if isinstance(launch, choices.Few):
        if out_features // groups % launch.rows:
            launch = replace(launch, rows=16)
        _few(x, weight, out, rows, bits, block, groups, addend, bias, launch)
    elif isinstance(launch, choices.Many):
        _many(x, weight, out, rows, block, groups, addend, bias, launch)
    else:
        _expanded(x, weight, out, rows, block, groups, addend, bias)


def _tiles(rows: int) -> choices.Many:
    few = rows <= 256
    side, warps = (64, 4) if few else (128, 8)
    return choices.Many(rows=side, tokens=side, warps=warps, stages=4 if few else here().linear_stages)


def _starts(letter: str, sizes: Sequence[int], total: int) -> dict[str, int]:
    """Where the second, third and fourth map of a stack begin."""
    starts = [*accumulate(sizes), total, total, total] if sizes else [total, total, total]
    return {f"{letter}{number + 1}": starts[number] for number in range(3)}


def multiply_merged(
    x: torch.Tensor, rounded_x: torch.Tensor | None, stacks: Sequence[MapStack]
) -> tuple[torch.Tensor, ...] | None:
    """The outputs of all maps of some stacks, in order, from one launch; None where these kernels cannot.

    At most one stack of FP8 weights and two of bf16, of four maps each.
    """
    rows, in_features = x.numel() // x.shape[-1], x.shape[-1]
    fp8 = [stack for stack in stacks if stack.weight.format.name == "fp8"]
    bf16 = [stack for stack in stacks if stack.weight.format.name == "bf16"]
    side = 32 if rows > 16 else 16
    if len(fp8) > 1 or len(bf16) > 2 or len(fp8) + len(bf16) < len(stacks) or rows > choices.FEW:
        return None
    if any(len(stack.sizes) > 4 or any(size % side for size in stack.sizes) for stack in stacks):
        return None
    launches = [
        choices.few(rows, max(stack.sizes), in_features, choices.BITS[stack.weight.format.name]) for stack in stacks
    ]
    warps = {None if launch is None else launch.warps for launch in launches}
    if len(warps) != 1 or None in warps:  # sums are to be those of the maps one by one
        return None
    steps = {stack.weight.format.name: launch.steps for stack, launch in zip(stacks, launches, strict=True) if launch}
    outputs = [x.new_empty(rows * sum(stack.sizes), dtype=stack.out_dtype) for stack in stacks]
    held = dict(zip([id(stack) for stack in stacks], outputs, strict=True))
    first = fp8[0] if fp8 else None
    x8, block = x, (1, 1)
    if first is not None:
        block = first.weight.format.block or block
        if first.rounding is not None:
            x8 = rounded(x, first.rounding.block, 0) if rounded_x is None else rounded_x
    data = [x if i >= len(bf16) else bf16[i].weight.data.view(torch.int16) for i in range(2)]
    scale = data[0] if first is None or first.weight.scale is None else first.weight.scale.view(torch.int16)
    totals = [sum(stack.sizes) for stack in [*fp8, *bf16]]
    N0 = totals[0] if fp8 else 0
    N1, N2 = [*totals[len(fp8) :], 0, 0][:2]
    kernels.few_rows_merged[(triton.cdiv(N0 + N1 + N2, side),)](
        x8, x if first is None else first.weight.data.view(torch.int16), scale, x if first is None else held[id(first)],
        x, data[0], held[id(bf16[0])] if bf16 else x, data[1], held[id(bf16[1])] if len(bf16) > 1 else x, rows,
        K=in_features, N0=N0, **_starts("a", first.sizes if first else (), N0), N1=N1,
        **_starts("b", bf16[0].sizes if bf16 else (), N1), N2=N2,
        **_starts("c", bf16[1].sizes if len(bf16) > 1 else (), N2), BLOCK_N=block[0], BLOCK_K=block[1], BN=side,
        BM=8 if rows <= 8 else 16 if rows <= 16 else 32, NW=next(iter(warps)), STEPS_8=steps.get("fp8", 1),
        STEPS_16=steps.get("bf16", 1), AHEAD=rows <= 8, PDL=ahead(), ASM=not interpreted(), num_warps=next(iter(warps)),
        num_stages=1, **options(),
    )  # fmt: skip
    return _maps(outputs, stacks, x)


def _maps(outputs: Sequence[torch.Tensor], stacks: Sequence[MapStack], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output of each map, from the memory of its stack."""
    found: list[torch.Tensor] = []
    for out, stack in zip(outputs, stacks, strict=True):
        parts = out.split([out.numel() // sum(stack.sizes) * size for size in stack.sizes])
        found += [part.view(*x.shape[:-1], size) for part, size in zip(parts, stack.sizes, strict=True)]
    return tuple(found)


def multiply_stack(x: torch.Tensor, stack: MapStack) -> tuple[torch.Tensor, ...] | None:
    """The outputs of the maps of one FP8 stack for more rows than `multiply_merged` takes; None where it cannot."""
    rows = x.numel() // x.shape[-1]
    launch = _tiles(rows)
    if stack.weight.format.name != "fp8" or len(stack.sizes) > 4 or not choices.FEW < rows < _EXPANDED:
        return None
    if any(size % launch.rows for size in stack.sizes):
        return None
    out = x.new_empty(rows * sum(stack.sizes), dtype=stack.out_dtype)
    block = 0 if stack.rounding is None else stack.rounding.block
    _many(x, stack.weight, out, rows, block, 1, None, None, launch, stack.sizes)
    return _maps([out], [stack], x)


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
        x, data, scale, x if addend is None else addend, x if bias is None else bias, out, rows,
        N=out_features, K=in_features, GROUP=out_features // groups, FORMAT=bits, BLOCK_N=block_n, BLOCK_K=block_k,
        ADDEND=addend is not None, BIAS=bias is not None, LARGEST=out.dtype == torch.int64, BN=launch.rows,
        BM=8 if rows <= 8 else 16 if rows <= 16 else 32, NW=launch.warps, STEPS=launch.steps, AHEAD=launch.ahead,
        PDL=ahead(), ASM=not interpreted(), num_warps=launch.warps, num_stages=1, **options(),
    )  # fmt: skip


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
    sizes: Sequence[int] = (),
) -> None:
    out_features, in_features = weight.shape
    x = rounded(x, block, 80)
    assert weight.scale is not None and weight.format.block is not None
    block_n, block_k = weight.format.block
    kernels.many_rows[(out_features // launch.rows * triton.cdiv(rows, launch.tokens),)](
        x, weight.data.view(torch.int16), weight.scale.view(torch.int16), x if addend is None else addend,
        x if bias is None else bias, out, rows,
        N=out_features, K=in_features, GROUP=out_features // groups, **_starts("n", sizes, out_features),
        BLOCK_N=block_n, BLOCK_K=block_k, ADDEND=addend is not None, BIAS=bias is not None, MERGED=len(sizes) > 0,
        BM=launch.rows, BT=launch.tokens, NW=launch.warps, NS=launch.stages, U=launch.unrolled, ASM=not interpreted(),
        num_warps=launch.warps, num_stages=launch.stages, **registers(launch.registers),
    )  # fmt: skip


def expanded(weight: Packed) -> torch.Tensor:
    """An FP8 weight as bf16 numbers, exact."""
    out_features, in_features = weight.shape
    assert weight.scale is not None and weight.format.block is not None
    block_n, block_k = weight.format.block
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.data.device)
    kernels.expand_fp8[(out_features * in_features // 4096,)](
        weight.data.view(torch.int16), weight.scale.view(torch.int16), out,
        K=in_features, BLOCK_N=block_n, BLOCK_K=block_k, SIZE=256, ASM=not interpreted(), num_warps=4,
    )  # fmt: skip
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
    if rows <= _FEW_LARGEST and launch is not None:
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
