"""Captured graphs on a CPU: kernel calls and torch operations that were made once, made again without the code between.

A small step is bound by what lies between kernels: Python, and asking for memory. A graph holds the calls of some code
with all their arguments; replayed, they read the same addresses, whatever lies there now, and write the same results.
Runs of kernel calls are one call of the library; torch operations between them are made again one by one. So the code
must not read values on the host: operations that do, or whose shapes depend on values, give no graph.

Memory that only kernels write and read becomes part of one block, which two results share when one is last read before
the other is written. Every other address must be of a tensor that is known to last: code that reads or writes anywhere
else has no graph, since nobody knows how long that memory lives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spyglass.ops.native import Kernels, append_words, best, hearing

Outputs = tuple[torch.Tensor, ...]

_FRESH = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_READS_HOST = (torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded)
_LINE = 64  # bytes; results begin on cache lines


class Uncapturable(Exception):
    """The code cannot be captured; the message says why."""


@dataclass(frozen=True, slots=True)
class _KernelCall:
    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _TorchCall:
    """One torch operation; `outs` are what it gave, which is written again; none for one that works in place."""

    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    outs: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        given = self.function(*self.arguments, **self.options)
        if len(self.outs) == 1 and isinstance(given, torch.Tensor):
            self.outs[0].copy_(given)
        elif self.outs:
            for out, new in zip(self.outs, given, strict=True):
                out.copy_(new)

    def tensors(self) -> list[torch.Tensor]:
        held = tree_leaves((self.arguments, dict(self.options), self.outs))
        return [leaf for leaf in held if isinstance(leaf, torch.Tensor)]


_Call = _KernelCall | _TorchCall


class CpuGraph:
    """The calls of `run`, to be made again; `outputs` is what it gave and is written anew by every replay.

    Not for two threads at once.
    """

    def __init__(
        self,
        kernels: Kernels,
        calls: Sequence[_Call],
        fresh: Sequence[torch.Tensor],
        lasting: Sequence[torch.Tensor],
        outputs: Outputs,
    ) -> None:
        torch_tensors = [tensor for call in calls if isinstance(call, _TorchCall) for tensor in call.tensors()]
        touched = {tensor.untyped_storage().data_ptr() for tensor in (*torch_tensors, *outputs)}
        self._lasting = [*lasting, *(tensor for tensor in fresh if tensor.data_ptr() in touched), *torch_tensors]
        movable = [tensor for tensor in fresh if tensor.data_ptr() not in touched]
        self.outputs = outputs
        results = _Ranges((tensor.data_ptr(), tensor.nbytes) for tensor in movable)
        others = _Ranges((held.data_ptr(), held.nbytes()) for held in (t.untyped_storage() for t in self._lasting))
        uses: dict[int, list[int]] = {}
        inside: list[tuple[int, int, int, int]] = []  # segment, word, result, bytes from its beginning
        segments: list[list[int] | _TorchCall] = []
        counts: list[int] = []
        number = 0
        for is_kernel, group in groupby(calls, key=lambda call: isinstance(call, _KernelCall)):
            members = list(group)
            if not is_kernel:
                segments += [call for call in members if isinstance(call, _TorchCall)]
                counts += [0] * len(members)
                number += len(members)
                continue
            words: list[int] = []
            for call in members:
                assert isinstance(call, _KernelCall)
                for word, pointer in append_words(words, kernels, call.name, call.arguments):
                    if (found := results.find(pointer)) is not None:
                        inside.append((len(segments), word, *found))
                        uses.setdefault(found[0], []).append(number)
                    elif others.find(pointer) is None:
                        raise Uncapturable(f"{call.name} uses memory that nobody promised to keep")
                number += 1
            segments.append(words)
            counts.append(len(members))
        starts, size = _share_memory({r: (min(u), max(u), movable[r].nbytes) for r, u in uses.items()})
        with torch.inference_mode(False):
            self._block = torch.empty(size, dtype=torch.uint8)
        base = self._block.data_ptr()
        for segment, word, result, offset in inside:
            words = segments[segment]  # type: ignore[assignment]
            words[word] = base + starts[result] + offset
        self._arrays = [np.array(part, np.uint64) for part in segments if isinstance(part, list)]
        arrays = iter(self._arrays)
        replay = kernels.replay
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (part, ()) if isinstance(part, _TorchCall) else (replay, (next(arrays).ctypes.data, count))
            for part, count in zip(segments, counts, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the block that results share."""
        return self._block.numel()

    def replay(self) -> Outputs:
        """Make all calls again; the outputs are the same tensors each time."""
        for function, arguments in self._steps:
            function(*arguments)
        return self.outputs


def capture(run: Callable[[], Outputs], lasting: Iterable[torch.Tensor], kernels: Kernels | None = None) -> CpuGraph:
    """Run the code and capture it. `lasting`: tensors that are the same in every replay; the graph keeps them.

    Raises:
        Uncapturable: the code did run, but its calls cannot stand for it.
    """
    watch = _Watch()
    with hearing(lambda name, arguments: watch.calls.append(_KernelCall(name, arguments))), watch:
        outputs = run()
    if watch.refused is not None:
        raise CapturedOnce(watch.refused, outputs)
    try:
        return CpuGraph(kernels or best(), watch.calls, watch.fresh, list(lasting), outputs)
    except Uncapturable as error:
        raise CapturedOnce(str(error), outputs) from error


class CapturedOnce(Uncapturable):
    """Carries what the code gave when it ran."""

    def __init__(self, why: str, outputs: Outputs) -> None:
        super().__init__(why)
        self.outputs = outputs


class _Watch(TorchDispatchMode):
    """Keeps what memory was taken for and every operation that is no view; `refused` says what cannot be captured."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.fresh: list[torch.Tensor] = []
        self.refused: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the method below with its compiler, whose import takes most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _FRESH:
            self.fresh.append(out)
            return out
        outs = tuple(out) if isinstance(out, list | tuple) else (out,)
        tensors = all(isinstance(each, torch.Tensor) for each in outs)
        if not tensors or any(tag in func.tags for tag in _READS_HOST) or _shape_follows_values(func, args):
            self.refused = f"{func} reads values on the host"
        elif func._schema.is_mutable:
            self.calls.append(_TorchCall(func, args, kwargs, ()))
        elif not _are_views(outs, args):
            self.calls.append(_TorchCall(func, args, kwargs, outs))
        return out


def _shape_follows_values(func: Any, args: Any) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def _are_views(outs: Sequence[torch.Tensor], args: Any) -> bool:
    given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    return all(out.untyped_storage().data_ptr() in given for out in outs)


class _Ranges:
    """Pieces of memory, (address, bytes) each, that do not overlap; of several that begin at one address, the first."""

    def __init__(self, pieces: Iterable[tuple[int, int]]) -> None:
        first: dict[int, tuple[int, int]] = {}
        for number, (start, size) in enumerate(pieces):
            first.setdefault(start, (number, size))
        self._starts = sorted(first)
        self._found = [first[start] for start in self._starts]

    def find(self, pointer: int) -> tuple[int, int] | None:
        """Number of the piece that holds the byte at `pointer`, and how far from its beginning; None if none does."""
        place = bisect_right(self._starts, pointer) - 1
        if place < 0:
            return None
        (number, size), offset = self._found[place], pointer - self._starts[place]
        return (number, offset) if offset < size else None


def _share_memory(uses: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Beginnings of results with (first call, last call, bytes) in one block, and its size.

    The lowest place that is free while a result is in use, in the order in which they come.
    """
    starts: dict[int, int] = {}
    total = 0
    for result, (first, last, size) in sorted(uses.items(), key=lambda item: item[1]):
        at = 0
        held = [(starts[other], uses[other]) for other in starts if uses[other][1] >= first and uses[other][0] <= last]
        for start, (_, _, taken) in sorted(held):
            if at + size <= start:
                break
            at = max(at, -(-(start + taken) // _LINE) * _LINE)
        starts[result] = at
        total = max(total, at + size)
    return starts, total
