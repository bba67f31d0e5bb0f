"""Engram tables on disk or in memory, gathered by rows (spec v41 5.4, 5.6).

The real tables have 101 GB each, so by default they stay memory-mapped and only the pages that are read enter memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spyglass.checkpoint.match import native_tensors
from spyglass.checkpoint.safetensors import TensorHeader, open_checkpoint
from spyglass.config.model import EngramConfig, ModelConfig
from spyglass.engram.hashing import HashConstants, hash_constants, row_ids
from spyglass.engram.vocabulary import read_classes
from spyglass.errors import CheckpointError
from spyglass.params.table import TABLE_ROWS, most_tensors
from spyglass.quant.formats import BF16, F32, Format

Placement = Literal["mmap", "host", "device"]
_NUMPY = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "BF16": np.uint16, "F32": np.float32}
_ROWS_AT_ONCE = 512  # rows one thread gathers at a time: page faults of a cold table overlap
_GATHER_THREADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of one table as stored: `data` [..., head_dim] bytes of e4m3 (uint8), bf16 bits (uint16) or float32;
    `scale` uint8 bytes of e8m0 [..., head_dim / 32], None without scales."""

    format: Format
    data: NDArray[Any]
    scale: NDArray[np.uint8] | None

    def __getitem__(self, rows: NDArray[np.int64]) -> TableRows:
        """The rows of the given numbers, copied."""
        scale = None if self.scale is None else _take(self.scale, rows)
        return TableRows(format=self.format, data=_take(self.data, rows), scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramStore:
    """Classes, hash constants and tables of one checkpoint.

    `placement` says where the tables are: "mmap" files, "host" memory, or "device": then a driver moves `tables` there
    and gathers itself.
    """

    config: EngramConfig
    classes_V: NDArray[np.int32]
    constants: tuple[HashConstants, ...]
    tables: Mapping[int, TableRows]
    placement: Placement

    def row_ids(
        self,
        ids_T: NDArray[np.int32],
        kinds_T: NDArray[np.int8],
        lookback_SL: NDArray[np.int32],
        query_start_S: NDArray[np.int32],
    ) -> dict[int, NDArray[np.int64]]:
        """Table rows by layer, int64 [T, columns]; see `hashing.row_ids`."""
        return row_ids(
            ids_T,
            kinds_T,
            lookback_SL,
            query_start_S,
            classes_V=self.classes_V,
            pad_token_id=self.config.pad_token_id,
            constants=self.constants,
        )

    @property
    def nbytes(self) -> int:
        return sum(
            int(table.data.nbytes) + (0 if table.scale is None else int(table.scale.nbytes))
            for table in self.tables.values()
        )


def open_engram(
    folder: Path, config: ModelConfig, tensors: Mapping[str, TensorHeader] | None = None, placement: Placement = "mmap"
) -> EngramStore:
    """The engram of a checkpoint folder; `tensors` are its headers by native name, read here when not given.

    Raises:
        CheckpointError: a table, the tokenizer or the token map is missing, damaged or does not fit the configuration.
        ConfigError: table sizes and hash constants disagree.
    """
    engram = config.text.engram
    assert engram is not None, "only for models with engram layers"
    constants = hash_constants(engram)
    if tensors is None:
        tensors = native_tensors(open_checkpoint(folder, most_tensors(config)))
    tables = open_tables(tensors, engram, placement)
    classes = read_classes(folder, engram, config.text.vocab_size)
    return EngramStore(config=engram, classes_V=classes, constants=constants, tables=tables, placement=placement)


def open_tables(
    tensors: Mapping[str, TensorHeader], engram: EngramConfig, placement: Placement = "mmap"
) -> dict[int, TableRows]:
    """The tables alone, by layer.

    Raises:
        CheckpointError: one is missing, damaged or of another shape.
    """
    return {
        layer: _open_table(tensors, f"layers.{layer}.engram.embed", (rows, engram.head_dim), placement)
        for layer, rows in zip(engram.layers, engram.num_rows, strict=True)
    }


def _open_table(
    tensors: Mapping[str, TensorHeader], name: str, shape: tuple[int, int], placement: Placement
) -> TableRows:
    weight = tensors.get(f"{name}.weight")
    if weight is None:
        raise CheckpointError(f"{name}.weight, an engram table, is in no shard; fetch the shard that holds it")
    formats = {"F8_E4M3": TABLE_ROWS, "BF16": BF16, "F32": F32}
    format = formats.get(weight.dtype)
    if format is None or weight.shape != shape:
        raise CheckpointError(
            f"{weight.file}: {name}.weight is {weight.dtype} {list(weight.shape)}, expected F8_E4M3, BF16 or F32 "
            f"{list(shape)}"
        )
    scale, scale_shape = tensors.get(f"{name}.scale"), format.scale_shape(shape)
    if scale_shape is None:
        return TableRows(format=format, data=_open(weight, placement), scale=None)
    if scale is None or scale.dtype != "F8_E8M0" or scale.shape != scale_shape:
        found = "is missing" if scale is None else f"is {scale.dtype} {list(scale.shape)}"
        raise CheckpointError(f"{name}.scale {found}, expected F8_E8M0 {list(scale_shape)}")
    return TableRows(format=format, data=_open(weight, placement), scale=_open(scale, placement))


def _open(header: TensorHeader, placement: Placement) -> NDArray[Any]:
    """A tensor's bytes as an array of its shape: mapped, or copied into memory for "host"."""
    first = header.start - header.start % mmap.ALLOCATIONGRANULARITY
    try:
        with open(header.file, "rb") as stream:
            mapped = mmap.mmap(
                stream.fileno(), header.start - first + header.nbytes, access=mmap.ACCESS_READ, offset=first
            )
    except OSError as error:
        raise CheckpointError(f"{header.file} cannot be mapped: {error.strerror}") from error
    if placement == "mmap" and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # rows lie far apart: reading ahead would only fetch rows nobody wants
    count = header.nbytes // np.dtype(_NUMPY[header.dtype]).itemsize
    array = np.frombuffer(mapped, _NUMPY[header.dtype], count, header.start - first).reshape(header.shape)
    return array.copy() if placement == "host" else array


def _take(table: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
    """table[rows]; many rows are gathered by several threads, so that waiting for the disk overlaps."""
    flat = rows.reshape(-1)
    if len(flat) <= _ROWS_AT_ONCE:
        return table[rows]
    out = np.empty((len(flat), *table.shape[1:]), table.dtype)

    def gather(first: int) -> None:
        part = slice(first, first + _ROWS_AT_ONCE)
        np.take(table, flat[part], axis=0, out=out[part], mode="clip")

    with ThreadPoolExecutor(_GATHER_THREADS) as pool:
        list(pool.map(gather, range(0, len(flat), _ROWS_AT_ONCE)))
    return out.reshape(*rows.shape, *table.shape[1:])
