"""Kernel calls that were made once, made again in one call and on other inputs.

A small step is bound by what lies between kernels: Python, and asking for memory. A tape holds the calls of some code
with all their arguments, so `Tape.replay` is that code for other inputs of the same shapes. That holds where the code
is nothing but kernel calls, views and fresh memory, and takes its ways by shapes and numbers on the host alone; a
`Recorder` watches every torch operation and gives no tape if it sees any other.

Memory that the calls wrote to becomes places of one block, which two results share when one is last read before the
other is written. Addresses of inputs are put in anew for each replay. All others must be of tensors that last,
the weights: code that reads or writes anywhere else has no tape, since nobody knows how long that memory lives.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spyglass.ops.native import Function, Kernels

_FRESH = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_LINE = 64  # bytes; results begin on cache lines
_WORD = (1 << 64) - 1


class _UnknownMemory(Exception):
    """A call's pointer lies in none of the tensors that are known."""


class Tape:
    """Calls to be made again: `name` in `Kernels` and arguments of each. Not for two threads at once."""

    def __init__(
        self,
        kernels: Kernels,
        calls: Sequence[tuple[str, tuple[Any, ...]]],
        inputs: Sequence[torch.Tensor],
        fresh: Sequence[torch.Tensor],
        lasting: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        self._replay, self._num_calls, self._lasting = kernels.replay, len(calls), lasting
        words, pointers = _as_words(kernels, calls)
        given, results, weights = _Ranges(inputs), _Ranges(fresh), _Ranges(lasting)
        uses: dict[int, list[int]] = {}
        inside: list[tuple[int, int, int]] = []  # word, result, bytes from its beginning
        outside: list[tuple[int, int, int]] = []  # the same for inputs
        for place, number, pointer in pointers:
            if (found := results.find(pointer)) is not None:
                inside.append((place, *found))
                uses.setdefault(found[0], []).append(number)
            elif (found := given.find(pointer)) is not None:
                outside.append((place, *found))
            elif weights.find(pointer) is None:
                raise _UnknownMemory
        found = results.find(out.data_ptr())
        assert found is not None, "what was recorded gives back memory of its own"
        uses.setdefault(found[0], []).append(len(calls))
        starts, size = _share_memory({result: (min(u), max(u), fresh[result].nbytes) for result, u in uses.items()})
        with torch.inference_mode(False):
            self._block = torch.empty(size, dtype=torch.uint8)
            first = starts[found[0]] + found[1]
            self._out = self._block[first : first + out.nbytes].view(out.dtype).view(out.shape)
        base = self._block.data_ptr()
        for place, result, offset in inside:
            words[place] = base + starts[result] + offset
        self._words = np.array(words, np.uint64)
        self._address = self._words.ctypes.data
        self._places, self._which, offsets = (np.array(column) for column in zip(*outside, strict=True))
        self._offsets = offsets.astype(np.uint64)

    @property
    def nbytes(self) -> int:
        """Bytes of its block."""
        return self._block.numel()

    def replay(self, pointers: Sequence[int]) -> torch.Tensor:
        """The result for inputs at these addresses, in the order of the recording; valid until the next replay."""
        self._words[self._places] = np.array(pointers, np.uint64)[self._which] + self._offsets
        self._replay(self._address, self._num_calls)
        return self._out


class Recorder:
    """Hears the calls that one model's ops make; `kernels` is what they must call."""

    def __init__(self, kernels: Kernels) -> None:
        heard: dict[str, Any] = {name: partial(self._call, name, getattr(kernels, name)) for name in kernels.on_tape}
        self.kernels = replace(kernels, **heard)
        self._library = kernels
        self._calls: list[tuple[str, tuple[Any, ...]]] | None = None
        self._thread = 0

    def _call(self, name: str, function: Function, *arguments: Any) -> None:
        function(*arguments)
        if self._calls is not None and threading.get_ident() == self._thread:
            self._calls.append((name, arguments))

    def record(
        self, run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], lasting: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Tape | None]:
        """What `run` gives, and its tape; None if a tape cannot stand for it. One recording at a time.

        `lasting` are tensors that are the same in every replay. The tape keeps them.
        """
        watch = _Watch()
        calls = self._calls = []
        self._thread = threading.get_ident()
        try:
            with watch:
                out = run()
        finally:
            self._calls = None
        if watch.strange:
            return out, None
        try:
            return out, Tape(self._library, calls, inputs, watch.fresh, lasting, out)
        except _UnknownMemory:
            return out, None


class _Watch(TorchDispatchMode):
    """Keeps what fresh memory was taken for, and whether anything happened that a tape cannot hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fresh: list[torch.Tensor] = []
        self.strange = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the method below with its compiler, whose import takes most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _FRESH:
            self.fresh.append(out)
        elif func._schema.is_mutable or not _is_view(out, args[0]):
            self.strange = True
        return out


def _is_view(out: Any, source: Any) -> bool:
    parts = out if isinstance(out, list | tuple) else [out]
    tensors = [part for part in (*parts, source) if isinstance(part, torch.Tensor)]
    return len(tensors) == len(parts) + 1 and len({t.untyped_storage().data_ptr() for t in tensors}) == 1


class _Ranges:
    """Tensors by where they lie; of several that begin at one place, the first."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first: dict[int, tuple[int, int]] = {}
        for number, tensor in enumerate(tensors):
            first.setdefault(tensor.data_ptr(), (number, tensor.nbytes))
        self._starts = sorted(first)
        self._found = [first[start] for start in self._starts]

    def find(self, pointer: int) -> tuple[int, int] | None:
        """Number of the tensor that holds the byte at `pointer`, and how far from its beginning; None if none does."""
        place = bisect_right(self._starts, pointer) - 1
        if place < 0:
            return None
        (number, size), offset = self._found[place], pointer - self._starts[place]
        return (number, offset) if offset < size else None


def _as_words(
    kernels: Kernels, calls: Sequence[tuple[str, tuple[Any, ...]]]
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The calls as `csrc/tape.cpp` reads them, and the pointers among them: word, number of the call, address."""
    words: list[int] = []
    pointers: list[tuple[int, int, int]] = []
    for number, (name, arguments) in enumerate(calls):
        address, letters = kernels.on_tape[name]
        words += [address, len(arguments)]
        for letter, value in zip(letters, arguments, strict=True):
            if letter == "p" and value:
                pointers.append((len(words), number, value))
            words.append(struct.unpack("<I", struct.pack("<f", value))[0] if letter == "f" else int(value or 0) & _WORD)
    return words, pointers


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
