"""Weights from disk into modules, one file after the other, each tensor straight into the memory that keeps it.

A tensor is read once into a tensor of its own, which the module takes over, so that beside the model only the tensors
being read and one file's scales are alive. A few threads read ahead: the time goes into copying and page faults, not
into Python.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from spyglass.checkpoint.match import PARTS, Match, Part, Source, match, part_of
from spyglass.checkpoint.safetensors import Checkpoint, TensorHeader, list_names, open_checkpoint
from spyglass.errors import CheckpointError
from spyglass.quant.packed import Packed, WeightSlot

READ_AHEAD_BYTES = 64 << 20
READ_THREADS = 4
TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # raw bytes: a numeric cast would destroy the exponents
    "I8": torch.uint8,  # two FP4 codes a byte
    "U8": torch.uint8,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class PartCount:
    """Tensors of one part: read, left unread on purpose, and entries that keep their initial value."""

    used: int
    unused: int
    at_init: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did. `skipped`: native names of the tensors left unread on purpose, by part."""

    counts: dict[Part, PartCount]
    skipped: dict[Part, tuple[str, ...]]
    ignored_files: tuple[str, ...]
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        lines = [f"read {self.nbytes / 1e9:.2f} GB in {self.seconds:.1f} s"]
        for part, count in self.counts.items():
            lines.append(f"{part}: {count.used} tensors used, {count.unused} unused, {count.at_init} left at init")
            if self.skipped[part]:
                lines.append(f"  skipped on purpose: {list_names(list(self.skipped[part]))}")
        if self.ignored_files:
            lines.append(f"files that the index does not name: {list_names(list(self.ignored_files))}")
        return "\n".join(lines)


def load_into(
    slots: Iterable[WeightSlot],
    checkpoint: Checkpoint | str | Path,
    *,
    skip: Iterable[Part] = ("draft",),
    progress: bool = True,
) -> LoadReport:
    """Fill every slot, reading each needed tensor once, in the order of the files.

    `skip` names parts that stay unread (`draft` unless asked for; `vision` when pictures are not wanted); engram tables
    never enter a module and stay where they are. `progress` shows a bar when standard error is a terminal.

    Raises:
        CheckpointError: tensors are missing, left over or misshapen (nothing is read then), or a file cannot be read.
    """
    started = time.perf_counter()
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    by_name: dict[str, WeightSlot] = {}
    for slot in slots:
        assert slot.name not in by_name, f"two slots are called {slot.name}"
        by_name[slot.name] = slot
    matched = match(checkpoint, by_name, skip=frozenset({*skip, "engram"}))
    matched.refuse_faults(checkpoint.directory)
    nbytes = sum(source.nbytes for source in matched.sources.values())
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc="loading", disable=None if progress else True) as bar:
        for name, packed in _stream(matched.sources):
            slot = by_name[name]
            slot.put(Packed(packed.format, packed.data, packed.scale, slot.shape))
            bar.update(matched.sources[name].nbytes)
    return LoadReport(
        counts=_counts(matched),
        skipped={part: tuple(names) for part, names in matched.skipped.items()},
        ignored_files=checkpoint.ignored_files,
        nbytes=nbytes,
        seconds=time.perf_counter() - started,
    )


def _counts(matched: Match) -> dict[Part, PartCount]:
    used, at_init = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, source in matched.sources.items():
        used[part_of(name)] += 1 if source.scale is None else 2
    for name in matched.at_init:
        at_init[part_of(name)] += 1
    return {part: PartCount(used[part], len(matched.skipped[part]), at_init[part]) for part in PARTS}


def _stream(sources: dict[str, Source]) -> Iterator[tuple[str, Packed]]:
    """Entries in the order of the files."""
    by_file: dict[Path, list[str]] = {}
    for name, source in sources.items():
        by_file.setdefault(source.weight.file, []).append(name)
    with _Files() as files, ThreadPoolExecutor(READ_THREADS, thread_name_prefix="checkpoint-read") as threads:
        for file in sorted(by_file):
            names = sorted(by_file[file], key=lambda name: sources[name].weight.start)
            yield from _stream_file({name: sources[name] for name in names}, files, threads)


def _stream_file(
    sources: dict[str, Source], files: _Files, threads: ThreadPoolExecutor
) -> Iterator[tuple[str, Packed]]:
    """Entries whose weights share a file. Their scales are small, lie apart from them, and are read first."""
    scaled = [(name, source.scale) for name, source in sources.items() if source.scale is not None]
    scaled.sort(key=lambda item: (item[1].file, item[1].start))
    read = threads.map(files.read, [header for _, header in scaled])
    scales = {name: tensor for (name, _), tensor in zip(scaled, read, strict=True)}
    waiting: deque[tuple[str, Future[torch.Tensor]]] = deque()
    ahead = 0
    for name, source in sources.items():
        waiting.append((name, threads.submit(files.read, source.weight)))
        ahead += source.weight.nbytes
        while ahead > READ_AHEAD_BYTES:
            ahead -= sources[waiting[0][0]].weight.nbytes
            yield _finish(*waiting.popleft(), sources, scales)
    while waiting:
        yield _finish(*waiting.popleft(), sources, scales)


def _finish(
    name: str, weight: Future[torch.Tensor], sources: dict[str, Source], scales: dict[str, torch.Tensor]
) -> tuple[str, Packed]:
    data = weight.result()
    return name, Packed(sources[name].format, data, scales.pop(name, None), tuple(data.shape))


class _Files:
    """Open files of one load; `read` may be called from several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, header: TensorHeader) -> torch.Tensor:
        """The tensor's bytes in a new tensor of the stored shape."""
        tensor = torch.empty(header.shape, dtype=TORCH_DTYPES[header.dtype])
        if header.nbytes == 0:
            return tensor
        view = tensor.view(torch.uint8).numpy().data.cast("B")
        done = 0
        try:
            descriptor = self._open(header.file)
            while done < header.nbytes:
                count = os.preadv(descriptor, [view[done:]], header.start + done)
                if count == 0:
                    raise CheckpointError(
                        f"{header.file} ended inside tensor {header.name!r}; it was changed meanwhile"
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{header.file} cannot be read: {error.strerror}") from error
        return tensor

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(self._descriptors[file], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._descriptors[file]
