"""Tensors off the disk in the order they lie there, each read once and straight into the memory that keeps it.

One thread reads ahead, so that the disk sees one sequential reader; the caller's thread meanwhile makes the next memory
real, which costs as much as filling it, and puts away what has arrived. Beside the entries handed over, only the
read-ahead is in memory, and halves of entries whose other half lies further on in the same file.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from spyglass.checkpoint.match import Source
from spyglass.checkpoint.safetensors import TensorHeader
from spyglass.errors import CheckpointError
from spyglass.quant.formats import Format
from spyglass.quant.packed import TORCH_DTYPES, Packed, in_large_pages

BATCH_BYTES = 8 << 20  # read as one piece of work: small tensors cost more to hand over than to read
BATCHES_AHEAD = 4
READ_BYTES = 512 << 10  # one call: small enough that the kernel's own read-ahead keeps running
Place = Callable[[str, Format], Packed | None]


@dataclass(frozen=True, slots=True)
class _Read:
    """One tensor to read: the entry it belongs to, where it lies, and the memory it goes to (None = new)."""

    name: str
    header: TensorHeader
    target: torch.Tensor | None


def stream(sources: Mapping[str, Source], place: Place = lambda name, format: None) -> Iterator[tuple[str, Packed]]:
    """(name, tensors) of every source, file by file. Shapes are those of the stored tensors.

    `place(name, format)` may offer the memory an entry is read into (contiguous, of the stored dtypes and shapes).

    Raises:
        CheckpointError: a file cannot be read or has become shorter.
    """
    by_file: dict[Path, dict[str, Source]] = {}
    for name, source in sources.items():
        by_file.setdefault(source.weight.file, {})[name] = source
    with _Files() as files, ThreadPoolExecutor(1, thread_name_prefix="checkpoint-read") as reader:
        for file in sorted(by_file):
            yield from _stream_file(file, by_file[file], place, files, reader)


def _stream_file(
    file: Path, sources: dict[str, Source], place: Place, files: _Files, reader: ThreadPoolExecutor
) -> Iterator[tuple[str, Packed]]:
    """Entries whose weights share a file; scales that lie in other files are read first."""
    halves: dict[str, dict[int, torch.Tensor]] = {}
    for read, tensor in _read_ahead(_plan_reads(file, sources, place), files, reader):
        name, source = read.name, sources[read.name]
        found = halves.setdefault(name, {})
        found[id(read.header)] = tensor
        if len(found) == (1 if source.scale is None else 2):
            del halves[name]
            scale = None if source.scale is None else found[id(source.scale)]
            data = found[id(source.weight)]
            yield name, Packed(source.format, data, scale, tuple(data.shape))


def _plan_reads(file: Path, sources: dict[str, Source], place: Place) -> list[_Read]:
    reads = []
    for name, source in sources.items():
        placed = place(name, source.format)
        reads.append(_Read(name, source.weight, None if placed is None else placed.data))
        if source.scale is not None:
            reads.append(_Read(name, source.scale, None if placed is None else placed.scale))
    return sorted(reads, key=lambda read: (read.header.file == file, read.header.file, read.header.start))


def _read_ahead(reads: list[_Read], files: _Files, reader: ThreadPoolExecutor) -> Iterator[tuple[_Read, torch.Tensor]]:
    """Tensors in the given order, a few batches of them read before they are asked for."""
    waiting: deque[tuple[list[_Read], Future[list[torch.Tensor]]]] = deque()
    for batch in _batches(reads):
        targets = [_memory(read) for read in batch]
        waiting.append((batch, reader.submit(files.read_all, batch, targets)))
        if len(waiting) > BATCHES_AHEAD:
            done, tensors = waiting.popleft()
            yield from zip(done, tensors.result(), strict=True)
    for done, tensors in waiting:
        yield from zip(done, tensors.result(), strict=True)


def _memory(read: _Read) -> torch.Tensor:
    """Where a tensor goes, every page of it touched: the kernel hands out memory only when it is written to."""
    target = read.target
    if target is None:
        target = in_large_pages(torch.empty(read.header.shape, dtype=TORCH_DTYPES[read.header.dtype]))
    assert target.nbytes == read.header.nbytes and target.is_contiguous(), (read.name, read.header, target.shape)
    if read.header.nbytes > 0:
        target.view(torch.uint8).view(-1)[:: mmap.PAGESIZE].zero_()
    return target


def _batches(reads: list[_Read]) -> Iterator[list[_Read]]:
    batch: list[_Read] = []
    size = 0
    for read in reads:
        batch.append(read)
        size += read.header.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Files:
    """Open files of one load."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read_all(self, reads: list[_Read], targets: list[torch.Tensor]) -> list[torch.Tensor]:
        for read, target in zip(reads, targets, strict=True):
            if read.header.nbytes > 0:
                self._read(read.header, target.view(torch.uint8).numpy().data.cast("B"))
        return targets

    def _read(self, header: TensorHeader, view: memoryview) -> None:
        piece = header.nbytes // header.shape[0] if header.pitch else header.nbytes
        try:
            descriptor = self._open(header.file)
            for number, first in enumerate(range(0, header.nbytes, piece)):
                start, done = header.start + number * header.pitch - first, first
                while done < first + piece:
                    stop = min(done + READ_BYTES, first + piece)
                    count = os.preadv(descriptor, [view[done:stop]], start + done)
                    if count == 0:
                        raise CheckpointError(
                            f"{header.file} ended inside {header.name!r}; it was changed while being read"
                        )
                    done += count
        except OSError as error:
            raise CheckpointError(f"{header.file} cannot be read: {error.strerror}") from error

    def _open(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._descriptors[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._descriptors[file]
