"""How entries are laid out in shards: file names, headers and byte places, all known before a value exists. Torch-free.

A shard holds whole layers and is filled in order up to a size limit; the official shape comes out as its 48 files. In a
file the widest elements come first, so that every tensor is aligned to its element.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from spyglass.checkpoint.safetensors import DTYPE_BYTES
from spyglass.params.hf_names import to_hf, to_stacked
from spyglass.params.table import Param, component_of, stored_tensors
from spyglass.quant.formats import Format

Spelling = Literal["native", "hf"]
SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor as a file holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one native tensor goes: `name` in its file and the byte offset inside that tensor (stacked experts)."""

    tensor: FileTensor
    offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its name, its header with length prefix, and where each tensor starts. `size` is that of the file."""

    file: str
    prefix: bytes
    starts: dict[str, int]
    size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """All shards of a checkpoint. `places`: per native tensor name, its tensor and the index of its shard."""

    shards: tuple[Shard, ...]
    places: dict[str, tuple[int, Place]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(shard.size - len(shard.prefix) for shard in self.shards)

    def index(self) -> str:
        weight_map = {name: shard.file for shard in self.shards for name in shard.starts}
        content = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        return json.dumps(content, indent=2) + "\n"


def plan_layout(
    entries: Iterable[tuple[str, Param, Format]], *, names: Spelling = "native", shard_bytes: int = SHARD_BYTES
) -> Layout:
    """Lay out (slot name, spec, format to write) entries; a single layer above `shard_bytes` still gets one file."""
    units: dict[tuple[int, int], dict[str, Place]] = {}
    for name, spec, format in entries:
        unit = units.setdefault(_unit(name), {})
        for tensor_name, dtype, shape in stored_tensors(name, spec, format):
            unit[tensor_name] = _place(FileTensor(tensor_name, dtype, shape), spec, names)
    groups = list(_fill([units[key] for key in sorted(units)], shard_bytes))
    shards = tuple(_shard(group, number, len(groups)) for number, group in enumerate(groups, start=1))
    places = {name: (index, place) for index, group in enumerate(groups) for name, place in group.items()}
    return Layout(shards, places)


def _unit(name: str) -> tuple[int, int]:
    """Sort key of what stays in one file: inputs and tower, layers, outputs, draft stages, engram tables."""
    group, _, tail = name.partition(".")
    if component_of(name) == "engram":
        return (4, int(tail.partition(".")[0]))
    if group in ("layers", "mtp"):
        return (1 if group == "layers" else 3, int(tail.partition(".")[0]))
    return (2, 0) if group in ("head", "norm") or group.startswith("hc_head_") else (0, 0)


def _place(tensor: FileTensor, spec: Param, names: Spelling) -> Place:
    if names == "native":
        return Place(tensor, 0)
    part = to_stacked(tensor.name)
    if part is None:
        return Place(FileTensor(to_hf(tensor.name), tensor.dtype, tensor.shape), 0)
    assert spec.num_experts > 0, tensor.name
    rows, columns = tensor.shape
    stacked = FileTensor(part.name, tensor.dtype, (spec.num_experts, rows * part.parts, columns))
    return Place(stacked, tensor.nbytes * (part.expert * part.parts + part.part))


def _fill(units: list[dict[str, Place]], shard_bytes: int) -> Iterator[dict[str, Place]]:
    """Join consecutive units until a shard would exceed its limit."""
    current: dict[str, Place] = {}
    size = 0
    for unit in units:
        nbytes = sum(tensor.nbytes for tensor in {place.tensor for place in unit.values()})
        if current and size + nbytes > shard_bytes:
            yield current
            current, size = {}, 0
        current = current | unit
        size += nbytes
    if current:
        yield current


def _shard(group: dict[str, Place], number: int, count: int) -> Shard:
    tensors = sorted(
        {place.tensor for place in group.values()}, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name)
    )
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = end
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    prefix = struct.pack("<Q", len(raw)) + raw
    starts = {name: len(prefix) + offset for name, offset in offsets.items()}
    return Shard(f"model-{number:05d}-of-{count:05d}.safetensors", prefix, starts, len(prefix) + end)
