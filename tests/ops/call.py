"""A call of an op: how its inputs are drawn, how it is run anywhere, and when two results agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.ops.linear_merged.reference import MapStack
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, Format
from spyglass.quant.packed import Packed
from tests.tolerance import OP_BFLOAT16, OP_FLOAT32, Tolerance, assert_close

ROWS = 37  # no multiple of anything a kernel tiles by
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Place = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of an op. `exact`: the result has no rounding that may differ between machines."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    exact: bool = False
    written: int | str | None = None  # argument that the op changes in place: its result, or beside it by name
    padding: bool = False  # the last row is padding
    flips: bool = False  # a result is rounded to a coarse grid, where a last bit may decide: one value in a hundred


class Source:
    """Seeded values of the activation dtype of a case, and its number of rows."""

    def __init__(self, dtype: torch.dtype, rows: int = ROWS, *, padding: bool = True) -> None:
        self.dtype, self.rows, self.padding = dtype, rows, padding and rows >= 4
        self.generator = torch.Generator().manual_seed(11)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(self.dtype if dtype is None else dtype)

    def fp32(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return self.normal(*shape, dtype=torch.float32, scale=scale)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def weight(self, *shape: int, format: Format = BF16) -> Packed:
        """Values over several powers of two, so that neighbouring scales differ."""
        values = self.fp32(*shape) * torch.exp2(self.below(4, *shape[:-1], 1).float() - 2)
        return encode(values * shape[-1] ** -0.5, format)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=self.generator, dtype=torch.int32)

    def choices(self, limit: int, count: int) -> torch.Tensor:
        """`count` different numbers below `limit` for every row, int32."""
        drawn = [torch.randperm(limit, generator=self.generator)[:count] for _ in range(self.rows)]
        return torch.stack(drawn).to(torch.int32)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, and NaN (or very large integers) before and behind them in memory."""
    margin = 64
    poison = float("nan") if tensor.dtype.is_floating_point else (tensor.dtype.itemsize == 1 or 1 << 30)
    whole = torch.full(
        (tensor.numel() + 2 * margin,), poison, dtype=torch.float32 if poison != poison else tensor.dtype
    )
    whole = whole.to(tensor.dtype).to(tensor.device)
    inside = whole[margin : margin + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def to_device(value: Any, device: str, place: Place = torch.clone) -> Any:
    """The same argument with every tensor in it on `device`, where `place` copies it (some ops write in place)."""
    if isinstance(value, torch.Tensor):
        return place(value.to(device))
    if isinstance(value, Packed):
        scale = None if value.scale is None else place(value.scale.to(device))
        return replace(value, data=place(value.data.to(device)), scale=scale)
    if isinstance(value, tuple):
        return tuple(to_device(part, device, place) for part in value)
    if isinstance(value, dict):
        return {key: to_device(part, device, place) for key, part in value.items()}
    if isinstance(value, ExpertAdapters | ExpertRanks | MapStack | Turn):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **to_device(parts, device, place))
    return value


def run_call(
    op: Callable[..., Any], call: Call, device: str = "cpu", place: Place = torch.clone
) -> tuple[torch.Tensor, ...]:
    """The op's results on `device`, as a tuple."""
    args = tuple(to_device(arg, device, place) for arg in call.args)
    options = to_device(call.options, device, place)
    with torch.inference_mode():
        out = op(*args, **options)
    if isinstance(call.written, int):
        return (args[call.written],)
    results = out if isinstance(out, tuple) else (out,)
    return results if call.written is None else (*results, options[call.written])


def assert_agrees(
    call: Call,
    results: tuple[torch.Tensor, ...],
    expected: tuple[torch.Tensor, ...],
    tolerance: Tolerance,
    label: str = "",
) -> None:
    """Dtypes, shapes and values of every result; bit for bit where a case is exact or a result holds integers."""
    assert len(results) == len(expected), label
    for result, want in zip(results, expected, strict=True):
        assert result.dtype == want.dtype and result.shape == want.shape, label
        got = result.cpu()
        if call.padding:
            assert torch.isfinite(got[-1].float()).all(), f"{label}: padding"
            got, want = got[:-1], want[:-1]
        if call.exact or not want.dtype.is_floating_point:
            assert torch.equal(got, want), label
        elif call.flips:
            off = (got.float() - want.float()).abs() > tolerance.absolute + tolerance.relative * want.float().abs()
            assert torch.isfinite(got.float()).all() and off.sum() <= max(1, off.numel() // 100), label
        else:
            assert_close(got, want, tolerance, label)


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """How far a kernel may be from the reference."""
    return OP_FLOAT32 if dtype == torch.float32 else OP_BFLOAT16
