"""FP4, FP8 and bf16 experts on tensor cores, from the bytes as they are stored: see `triton_kernel.py`.

The host reads nothing from the device: lists of rows by expert are made there, grids are sized by upper bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from spyglass.ops import gpu, tuned
from spyglass.ops.experts_grouped import reference
from spyglass.ops.experts_grouped.adapters import Addends, ExpertAdapters
from spyglass.ops.linear_block.triton import linear_block
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed

_BITS = {"fp4": 4, "fp8": 8, "bf16": 16}
_FEW_EXPERTS = 32  # so few can all see every row
_FEW_CHOICES = 1024  # more are sorted in parts and multiplied in tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """A launch of `few`: warps that share a sum, 16-byte loads in flight a thread and row."""

    warps: int
    steps: int = 4
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """A launch of `many`: weight rows and tokens of a tile."""

    rows: int
    tokens: int
    warps: int = 8
    stages: int = 3
    unrolled: int = 1
    registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Launches of one call: both ends of `few` or of `many`."""

    up: Few | Many
    down: Few | Many


def usable(device_type: str, dtype: str) -> bool:
    """bf16 activations wherever Triton is."""
    return dtype == "bfloat16" and gpu.usable(device_type, dtype)


def tuning(rows: int, chosen: int, w1: Packed, w2: Packed) -> Tuning:
    """The launches for a number of rows; upper limits decide, so that a bucket of rows has one answer."""
    found = tuned.find("experts_grouped", (Tuning, Few, Many), rows, **shape_key(chosen, w1))
    if isinstance(found, Tuning):
        return found
    width, hidden = w1.shape[1:]
    if rows <= 2:
        return Tuning(up=_few(hidden, 4 if w1.tiled else 2), down=_few(width, 4))
    if rows * chosen <= _FEW_CHOICES or w1.format.name != "fp4":
        return Tuning(up=_few(hidden, 1 if w1.tiled else 2), down=_few(width, 1))
    tile = Many(rows=128, tokens=64, stages=gpu.here().expert_stages)
    return Tuning(up=tile, down=tile)


def shape_key(chosen: int, w1: Packed) -> dict[str, object]:
    """What a table knows a layer's experts by."""
    experts, width, hidden = w1.shape
    names = f"{w1.format.name}{'tiled' if w1.tiled else ''}"
    return {"weight": names, "experts": experts, "width": width, "hidden": hidden, "chosen": chosen}


def _few(inputs: int, warps: int) -> Few:
    """As many warps and steps as a sum of so many inputs divides into."""
    steps = 4
    while inputs % (warps * steps * 128):
        warps, steps = (warps // 2, steps) if warps > 1 else (1, steps // 2)
    return Few(warps=warps, steps=steps)


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
    launches: Tuning | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves fp32 activations, gradients, dropout and odd shapes or formats."""
    adapter_T, adapters = (None, None) if adapters is None or adapter_T is None else (adapter_T.contiguous(), adapters)
    if _learns(x_TC, weights_TK, (w1, w3, w2), adapters) or not suits(x_TC, ids_TK, w1, w3, w2, rounding):
        if w1.shape[0] <= _FEW_EXPERTS and not _learns(x_TC, weights_TK, (w1, w3, w2), adapters):
            addends = None if adapters is None or adapter_T is None else partial(Addends(adapters), adapter_N=adapter_T)
            return _every_expert(x_TC, ids_TK, weights_TK, w1, w3, w2, limit, rounding, addends)
        return reference.experts_grouped(
            x_TC, ids_TK, weights_TK, w1, w3, w2, limit=limit, rounding=rounding, adapter_T=adapter_T, adapters=adapters
        )
    from spyglass.ops.experts_grouped import triton_launch

    rows, chosen = ids_TK.shape
    if rows == 0:
        return torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    launches = launches or tuning(rows, chosen, w1, w2)
    call = triton_launch.Call(
        x_TC=x_TC.contiguous(),
        ids_TK=ids_TK.contiguous(),
        weights_TK=weights_TK.contiguous(),
        w1=w1,
        w3=w3,
        w2=w2,
        limit=limit,
        block=0 if rounding is None else rounding.block,
        bits=_BITS[w1.format.name],
        adapter_T=adapter_T,
        adapters=adapters,
    )
    if isinstance(launches.up, Few) and isinstance(launches.down, Few):
        return triton_launch.few_rows(call, launches.up, launches.down)
    assert isinstance(launches.up, Many) and isinstance(launches.down, Many)
    return triton_launch.many_rows(call, launches.up, launches.down)


def _every_expert(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    limit: float,
    rounding: FakeQuant | None,
    addends: Callable[[str, int, torch.Tensor], torch.Tensor | None] | None,
) -> torch.Tensor:
    """The reference without a look at the device: all rows through every expert, those that it has no part in left
    out of the sum. For small models of odd shapes, whose steps are to be captured.
    """

    def product(matrix: str, weight: Packed, x: torch.Tensor, expert: int) -> torch.Tensor:
        added = None if addends is None else addends(matrix, expert, x)
        return linear_block(x, weight[expert], rounding=rounding, addend_TO=added).float()

    out_TC = torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    for expert in range(w1.shape[0]):
        chosen_TK = ids_TK == expert
        weight_T1 = torch.where(chosen_TK, weights_TK, 0.0).sum(1, keepdim=True)
        gate = product("w1", w1, x_TC, expert).clamp(max=limit)
        up = product("w3", w3, x_TC, expert).clamp(-limit, limit)
        z = (torch.nn.functional.silu(gate) * up * weight_T1).to(x_TC.dtype)
        y_TC = product("w2", w2, z, expert)
        out_TC += torch.where(chosen_TK.any(1, keepdim=True), y_TC, 0.0)
    return out_TC


def _learns(
    x_TC: torch.Tensor, weights_TK: torch.Tensor, stacks: tuple[Packed, ...], adapters: ExpertAdapters | None
) -> bool:
    """Whether a gradient is wanted, or inputs of adapters are dropped as while they train."""
    ranks = [] if adapters is None else adapters.matrices.values()
    given = [x_TC, weights_TK, *(w.data for w in stacks), *(t for each in ranks for t in (each.a_RI, each.b_RO))]
    return gpu.learns(*given) or (adapters is not None and adapters.dropout > 0)


def suits(
    x_TC: torch.Tensor, ids_TK: torch.Tensor, w1: Packed, w3: Packed, w2: Packed, rounding: FakeQuant | None
) -> bool:
    """Whether the kernels take these dtypes, formats and shapes."""
    format, (_, width, hidden) = w1.format, w1.shape
    if not w1.format == w3.format == w2.format or w1.tiled != w3.tiled or ids_TK.dtype != torch.int32:
        return False
    if not gpu.multiplies(x_TC.dtype):
        return False
    if rounding is not None and (rounding.element, rounding.scale) != ("e4m3", "e8m0"):
        return False
    if format.name not in _BITS or format.scale_dtype == "F32" or width % 128 or hidden % 128:
        return False
    if format.name == "fp4":
        return True
    rows, columns = format.block or (1, 1)
    return format.name == "bf16" or not any(side % rows or side % (2 * columns) for side in (width, hidden))
