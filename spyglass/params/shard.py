"""Which part of a parameter each process of a tensor-parallel group holds, in logical and in stored places. Torch-free.

A cut runs between units (see `declared`): rank r of n gets units [U·r/n, U·(r+1)/n), so that sizes differ by one unit
at most, the last rank has the most, and with more processes than units some hold nothing. The parts of all ranks, put
together along the axis, are the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spyglass.errors import ConfigError
from spyglass.params.table import Param, ParamTable
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

    def held(self, param: Param) -> Param:
        """A parameter as this process has it: with the shape and the groups of its part."""
        cut = None if self.size == 1 else self.cut(param)
        if cut is None:
            return param
        shape, count = list(param.shape), cut.stop - cut.start
        groups = param.groups * count // shape[cut.axis] if param.groups > 1 else 1
        shape[cut.axis] = count
        return replace(param, shape=tuple(shape), groups=groups)

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


WHOLE = Shard(0, 1)
_MAX_SIZE = 64


def even_sizes(params: ParamTable) -> tuple[int, ...]:
    """Numbers of processes of which each gets as many groups of heads and experts as the others.

    The vocabulary may be divided unevenly.
    """
    return tuple(size for size in range(1, _MAX_SIZE + 1) if not any(count % size for count in _counts(params)))


def require_even(params: ParamTable, size: int) -> None:
    """Raises ConfigError unless `size` is one of `even_sizes`, which are named."""
    good = even_sizes(params)
    if size not in good:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but this model divides into {', '.join(map(str, good))} "
            f"{'processes' if good[-1] > 1 else 'process'}: its groups of heads, experts and shared expert come in "
            f"{', '.join(map(str, sorted(_counts(params))))} parts; choose one of these"
        )


def _counts(params: ParamTable) -> set[int]:
    """Into how many parts each of those can be divided."""
    return {
        param.num_units
        for param in params.values()
        if param.split == "experts" or (param.split != "none" and param.kind != "table" and param.unit > 1)
    }
