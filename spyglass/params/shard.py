"""Which part of a parameter each process of a tensor-parallel group holds, in logical and in stored places. Torch-free.

A cut runs between units (see `declared`): rank r of n gets units [U·r/n, U·(r+1)/n), so that sizes differ by one unit
at most, the last rank has the most, and with more processes than units some hold nothing. The parts of all ranks, put
together along the axis, are the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spyglass.errors import ConfigError
from spyglass.params.table import Param
from spyglass.quant.formats import Format


@dataclass(frozen=True, slots=True)
class Cut:
    """`start` to `stop` of `axis` (0 rows, 1 columns)."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Process `rank` of `size`."""

    rank: int
    size: int

    def span(self, units: int) -> tuple[int, int]:
        """The units that this process holds, first and end; for experts, which of them."""
        return units * self.rank // self.size, units * (self.rank + 1) // self.size

    def cut(self, param: Param) -> Cut | None:
        """The rows or columns of a parameter that are held here; None = all of it. A held expert is whole."""
        if param.split not in ("rows", "columns"):
            return None
        first, end = self.span(param.num_units)
        return Cut(0 if param.split == "rows" else 1, first * param.unit, end * param.unit)

    def stored_cuts(self, name: str, param: Param, format: Format) -> Iterator[Cut | None]:
        """The same in the stored weight and then, for a packed format, in its scale.

        Raises:
            ConfigError: a cut would run through a scale block.
        """
        cut = self.cut(param)
        if cut is None:
            yield from [None] * (1 if format.block is None else 2)
            return
        codes = param.shape[-1] // format.storage_shape(param.shape)[-1]  # in an element of the stored weight
        step = codes if cut.axis == 1 else 1
        yield Cut(cut.axis, cut.start // step, cut.stop // step)
        if format.block is not None:
            block = format.block[cut.axis]
            if cut.start % block or (cut.stop % block and cut.stop != param.shape[cut.axis]):
                raise ConfigError(
                    f"{name} stored as {format} cannot be cut among {self.size} processes: units of {param.unit} "
                    f"{param.split} do not end on scale blocks of {block}; use fewer processes"
                )
            yield Cut(cut.axis, cut.start // block, -(-cut.stop // block))
