"""Weights from disk into modules, and the account of what was read, skipped and left alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from spyglass.checkpoint.match import PARTS, Match, Part, Wanted, match, part_of
from spyglass.checkpoint.origin import mixed_revisions
from spyglass.checkpoint.safetensors import Checkpoint, list_names, open_checkpoint
from spyglass.checkpoint.stream import stream
from spyglass.checkpoint.zeros import zero_stretches
from spyglass.errors import CheckpointError
from spyglass.params.shard import WHOLE, Shard
from spyglass.params.table import ParamTable
from spyglass.progress import Progress
from spyglass.quant.formats import Format
from spyglass.quant.pack import E8M0_NAN
from spyglass.quant.packed import Packed, WeightSlot


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
            if part == "engram" and not count.unused:
                continue
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
    shard: Shard = WHOLE,
    params: ParamTable | None = None,
) -> LoadReport:
    """Fill every slot, reading each needed tensor once, in the order of the files.

    Slots of one of several processes are of the shapes that `shard` has of `params`; the checkpoint is checked against
    the whole, and of each tensor only that part is read.

    `skip` names parts that stay unread (`draft` unless asked for; `vision` when images are not wanted); engram tables
    never enter a module and stay where they are. `progress` shows a bar when standard error is a terminal.

    Raises:
        CheckpointError: tensors are missing, left over or misshapen or long stretches of a file are zeros (nothing is
            read then), a file cannot be read, or a scale, norm, bias or other plain tensor holds NaN or infinity.
        ConfigError: a packed tensor cannot be divided among so many processes.
    """
    started = time.perf_counter()
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    by_name: dict[str, WeightSlot] = {}
    for slot in slots:
        assert slot.name not in by_name, f"two slots are called {slot.name}"
        by_name[slot.name] = slot
    wanted: dict[str, Wanted] = dict(by_name)
    if params is not None and shard.size > 1:
        wanted = {name: one for name, one in params.items() if name in by_name or one.split == "experts"}
    matched = match(checkpoint, wanted, skip=frozenset({*skip, "engram"}))
    matched.refuse_faults(checkpoint.directory)
    sources = matched.sources
    if params is not None and shard.size > 1:
        sources = {name: source.held(name, params[name], shard) for name, source in sources.items() if name in by_name}
    if shard.rank == 0:  # which looks for all
        if empty := zero_stretches(checkpoint):
            raise CheckpointError("\n".join(map(str, empty)))
        for line in mixed_revisions(checkpoint):
            logging.getLogger(__name__).warning("%s: %s", checkpoint.directory, line)
    nbytes = sum(source.nbytes for source in sources.values())

    def place(name: str, format: Format) -> Packed | None:
        offer = by_name[name].place
        return None if offer is None else offer(format)

    with Progress(total=nbytes, unit="B", unit_scale=True, desc="loading", show=progress) as bar:
        for name, packed in stream(sources, place):
            slot = by_name[name]
            _refuse_non_numbers(name, packed, slot.kind)
            slot.put(Packed(packed.format, packed.data, packed.scale, slot.shape))
            bar.update(sources[name].nbytes)
    return LoadReport(
        counts=_counts(matched),
        skipped={part: tuple(names) for part, names in matched.skipped.items()},
        ignored_files=checkpoint.ignored_files,
        nbytes=nbytes,
        seconds=time.perf_counter() - started,
    )


def _refuse_non_numbers(name: str, packed: Packed, kind: str) -> None:
    """Refuse scales and plain tensors with NaN or infinity, which a router's bias turns into a silent wrong choice.

    They are a small part of a checkpoint; to search its matrices would cost as much as to read them.
    """
    scale = packed.scale
    if scale is not None:
        sound = int(scale.max()) < E8M0_NAN if scale.dtype == torch.uint8 else bool(scale.isfinite().all())
    else:
        sound = kind != "vector" or bool(packed.data.isfinite().all())
    if not sound:
        what = f"{name}.scale" if scale is not None else name
        raise CheckpointError(f"{what} holds a value that is no finite number; the file is damaged, download it again")


def _counts(matched: Match) -> dict[Part, PartCount]:
    used, at_init = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, source in matched.sources.items():
        used[part_of(name)] += 1 if source.scale is None else 2
    for name in matched.at_init:
        at_init[part_of(name)] += 1
    return {part: PartCount(used[part], len(matched.skipped[part]), at_init[part]) for part in PARTS}
