"""Safetensors headers and the shard index, read and distrusted before a single byte is allocated for them. Torch-free.

A file is an 8-byte little-endian header length, a JSON header, then the tensors back to back. Everything the header
claims (lengths, shapes, dtypes, offsets) is checked against the size of the file on disk, so that a truncated,
overlapping or padded file is refused by name instead of turning into zeros.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spyglass.errors import CheckpointError
from spyglass.params.shard import Cut

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_TENSORS = 400_000  # of a checkpoint whose configuration is not known; the largest release has 150,000
_BYTES_EACH = 512  # of a header, for each of the tensors that there may be
_MARKS_EACH = {b'"': 16, b",": 16, b"[": 4, b"{": 4}  # the same for the marks that JSON is made of
MAX_NAMES_SHOWN = 20
MAX_DIMENSIONS = 8
_MAX_NAME = 10_000
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_SHARD_NAME = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor on disk. `start`, `nbytes`: bytes of `file`. The shape is the stored one (packed FP4 is halved).

    A part of a tensor's columns lies in a piece per row: `pitch` bytes from the beginning of one to that of the next.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int
    pitch: int = 0

    def narrow(self, cut: Cut | None) -> TensorHeader:
        """Some of its rows or columns, None = all; each of a whole tensor."""
        if cut is None:
            return self
        assert not self.pitch and len(self.shape) <= 2
        shape, whole = list(self.shape), self.shape[cut.axis]
        shape[cut.axis] = cut.stop - cut.start
        row_bytes = self.nbytes // self.shape[0]
        step = row_bytes if cut.axis == 0 else row_bytes // whole
        pitch = row_bytes if cut.axis == 1 and shape[1] < whole else 0
        nbytes = math.prod(shape) * DTYPE_BYTES[self.dtype]
        return replace(self, shape=tuple(shape), start=self.start + cut.start * step, nbytes=nbytes, pitch=pitch)


def list_names(names: list[str]) -> str:
    """The first 20 names and how many more there are."""
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    return shown if len(names) <= MAX_NAMES_SHOWN else f"{shown} and {len(names) - MAX_NAMES_SHOWN} more"


def read_header(file: Path, most_tensors: int = MAX_TENSORS) -> dict[str, TensorHeader]:
    """Headers of one file by tensor name, all of them consistent with the file's size.

    Raises:
        CheckpointError: the file is missing, truncated, too long, not safetensors, or describes impossible tensors, or
            has far more in its header than so many tensors need; that is found before anything is made of it.
    """
    size, raw = _read_raw_header(file)
    _refuse_large(file, raw, most_tensors)
    entries = _parse_json(file, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{file}: __metadata__ must map strings to strings")
    data_start = 8 + len(raw)
    tensors = {name: _tensor_header(file, name, entry, data_start) for name, entry in entries.items()}
    _check_coverage(file, list(tensors.values()), data_start, size)
    return tensors


def _read_raw_header(file: Path) -> tuple[int, bytes]:
    """File size and the header's bytes; reads nothing that the file does not have."""
    try:
        status = os.stat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{file} is not a regular file")
        with open(file, "rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length < 2 or length > MAX_HEADER_BYTES or 8 + length > status.st_size:
                raise CheckpointError(
                    f"{file} is not a safetensors file or is truncated: it has {status.st_size} bytes and announces a "
                    f"header of {length} (allowed: 2 to {MAX_HEADER_BYTES}, within the file); download it again"
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if len(raw) != length:
        raise CheckpointError(f"{file} ended while its header was read")
    return status.st_size, raw


def _refuse_large(file: Path, raw: bytes, most_tensors: int) -> None:
    """Raises CheckpointError: what lists tensors has far more than these need. Counts bytes, which costs no memory."""
    most_tensors = min(most_tensors, MAX_TENSORS)
    if len(raw) > (1 << 20) + _BYTES_EACH * most_tensors or any(
        raw.count(mark) > each * most_tensors for mark, each in _MARKS_EACH.items()
    ):
        raise CheckpointError(
            f"{file} lists far more than the {most_tensors:,} tensors that this model can have; use the config.json "
            "that belongs to these files, or download them again"
        )


def _parse_json(file: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{file}: the header names twice: {list_names(twice)}")
        return result

    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the header is not valid JSON ({error}); download or write the file again"
        ) from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: the header must be a JSON object, found {type(entries).__name__}")
    return entries


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _tensor_header(file: Path, name: str, entry: Any, data_start: int) -> TensorHeader:
    """One entry, its dtype, shape and byte range agreeing with one another."""
    if len(name) > _MAX_NAME:
        raise CheckpointError(f"{file}: a tensor has a name of {len(name):,} characters, {name[:80]!r}...")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file}: tensor {name!r} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{file}: tensor {name!r} has dtype {dtype!r}; known are {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        expected = f"expected a list of at most {MAX_DIMENSIONS} sizes"
        raise CheckpointError(f"{file}: tensor {name!r} has shape {str(shape)[:80]}, {expected}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{file}: tensor {name!r} has data_offsets {str(offsets)[:80]}, expected [begin, end]")
    nbytes = DTYPE_BYTES[dtype]
    for size in shape:
        nbytes *= size
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{file}: tensor {name!r} {dtype} {shape} needs {nbytes} bytes, its data_offsets {offsets} differ from that"
        )
    return TensorHeader(name, dtype, tuple(shape), file, data_start + offsets[0], nbytes)


def _check_coverage(file: Path, tensors: list[TensorHeader], data_start: int, size: int) -> None:
    """Tensors must fill the file from the header to its end without gaps or overlaps."""
    end = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != end:
            what = "overlaps the one before it" if tensor.start < end else "leaves a gap before it"
            raise CheckpointError(f"{file}: tensor {tensor.name!r} {what} (byte {tensor.start}, expected {end})")
        end += tensor.nbytes
    if end != size:
        what = "is truncated" if end > size else "is longer than its header says"
        raise CheckpointError(f"{file} {what}: the header ends at byte {end}, the file has {size}; download it again")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint folder by their name on disk; nothing but headers has been read.

    `ignored_files` are safetensors files of the folder that the index does not name.
    """

    directory: Path
    tensors: dict[str, TensorHeader]
    files: tuple[Path, ...]
    ignored_files: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted (`metadata.total_size` of the index)."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def has_packed_weights(self) -> bool:
        """Whether any matrix is stored as FP8 or FP4, drafts' included: the released code rounds activations then."""
        weights = (tensor for name, tensor in self.tensors.items() if not name.endswith(("scale", "scale_inv")))
        return any(tensor.dtype in ("F8_E4M3", "I8", "U8") for tensor in weights)

    def sparse_files(self) -> tuple[str, ...]:
        """Files of which less than half is on disk: headers-only folders and unfinished downloads read as zeros.

        Worth a remark, no fault: file systems that compress or count otherwise exist.
        """
        status = [(file.name, os.stat(file)) for file in self.files]
        return tuple(
            name for name, entry in status if entry.st_size > 1 << 20 and entry.st_blocks * 1024 < entry.st_size
        )


def open_checkpoint(path: str | Path, most_tensors: int = MAX_TENSORS) -> Checkpoint:
    """Read and check the index and all headers of a checkpoint folder; tensors stay on disk.

    `most_tensors` (`params.table.most_tensors`) bounds what its headers may list.

    Raises:
        CheckpointError: the folder, a shard or a tensor is missing, index and files disagree, or a file is damaged;
            every damaged file is named.
    """
    directory = Path(path)
    if not os.path.isdir(directory):
        raise CheckpointError(
            f"{directory} is not a folder; expected a checkpoint folder with config.json and *.safetensors"
        )
    try:
        present = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    index = directory / INDEX_NAME
    weight_map = _read_index(index, most_tensors) if os.path.lexists(index) else None
    names = sorted(set(weight_map.values())) if weight_map is not None else _files_without_index(directory, present)
    if absent := sorted(set(names) - set(present)):
        others = sorted(set(present) - set(names))
        beside = f"; files that it does not name are {list_names(others)}" if others else ""
        raise CheckpointError(
            f"{directory}: the index does not match the files: {len(absent)} of the {len(names)} that {INDEX_NAME} "
            f"names are missing: "
            f"{list_names(absent)}{beside}; fetch them, or the index of the files that are there"
        )
    headers = _read_headers([directory / name for name in names], most_tensors)
    tensors: dict[str, TensorHeader] = {}
    for header in headers:
        twice = sorted(header.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{directory}: found in more than one shard: {list_names(twice)}")
        tensors.update(header)
    if weight_map is not None:
        _check_index(directory, weight_map, tensors)
    return Checkpoint(
        directory,
        tensors,
        tuple(directory / name for name in names),
        tuple(name for name in present if name not in set(names)),
    )


def _read_headers(files: list[Path], most_tensors: int) -> list[dict[str, TensorHeader]]:
    headers, faults, found = [], [], 0
    for file in files:
        try:
            headers.append(read_header(file, most_tensors))
            found += len(headers[-1])
        except CheckpointError as error:
            faults.append(str(error))
        if found > most_tensors or len(faults) > MAX_NAMES_SHOWN:
            faults.append(f"{file}: not read any further, with {found:,} tensors and {len(faults)} faults so far")
            break
    if faults:
        raise CheckpointError("\n".join(faults))
    return headers


def _read_index(index: Path, most_tensors: int) -> dict[str, str]:
    """`weight_map` of the index: tensor name to file name in the same folder."""
    try:
        status = os.stat(index)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_HEADER_BYTES:
            raise CheckpointError(f"{index} is not a file of at most {MAX_HEADER_BYTES} bytes")
        raw = index.read_bytes()
        _refuse_large(index, raw, most_tensors)
        content = _parse_json(index, raw)
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to file names")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or "/" in file
            or "\\" in file
            or "\0" in file
        ):
            raise CheckpointError(
                f"{index}: {name!r} is said to be in {file!r}, expected a safetensors file of this folder"
            )
    return weight_map


def _files_without_index(directory: Path, present: list[str]) -> list[str]:
    """The single file of a folder without index."""
    if "model.safetensors" in present:
        return ["model.safetensors"]
    match = _SHARD_NAME.fullmatch(present[0]) if len(present) == 1 else None
    if len(present) == 1 and (match is None or int(match[2]) == 1):
        return present
    found = list_names(present) or "no safetensors file"
    raise CheckpointError(f"{directory}: found {found} but no {INDEX_NAME}; a sharded checkpoint needs its index")


def _check_index(directory: Path, weight_map: dict[str, str], tensors: dict[str, TensorHeader]) -> None:
    """Every tensor must lie in the shard the index names, and no shard may hold others."""
    absent = sorted(name for name in weight_map if name not in tensors)
    unlisted = sorted(name for name in tensors if name not in weight_map)
    moved = sorted(
        f"{name} (listed in {file}, found in {tensors[name].file.name})"
        for name, file in weight_map.items()
        if name in tensors and tensors[name].file.name != file
    )
    parts = []
    for what, names in (("in no shard", absent), ("not listed", unlisted), ("in another shard", moved)):
        if names:
            parts.append(f"{what}: {list_names(names)}")
    if parts:
        raise CheckpointError(f"{directory}: the index does not match the files: " + "; ".join(parts))
