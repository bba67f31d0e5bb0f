"""Checkpoints to disk, one entry at a time: sharded, indexed, bit for bit what was given.

Sizes are known before values, so a file is laid out first and each value is written to its place as soon as it exists;
no more than one entry is in memory. Files get their names only when all of them are complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spyglass.checkpoint.layout import SHARD_BYTES, Layout, Shard, Spelling, plan_layout
from spyglass.checkpoint.safetensors import INDEX_NAME, list_names
from spyglass.errors import CheckpointError
from spyglass.params.table import Param
from spyglass.quant.formats import Format
from spyglass.quant.packed import TORCH_DTYPES, Packed

_TEMPORARY = ".partial"


@dataclass(frozen=True, slots=True)
class SaveItem:
    """One entry to write: slot name, logical shape and kind, the format of the file, and a function that yields it."""

    name: str
    spec: Param
    format: Format
    make: Callable[[], Packed]


def save_checkpoint(
    directory: str | Path,
    items: Sequence[SaveItem],
    *,
    names: Spelling = "native",
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Layout:
    """Write weights and index; `progress` gets the bytes of each entry. Config and tokenizer are the caller's.

    Raises:
        CheckpointError: the folder holds other safetensors files, the disk is too small, or a write fails; the folder
            is then as it was.
    """
    layout = plan_layout([(item.name, item.spec, item.format) for item in items], names=names, shard_bytes=shard_bytes)
    with _new_files(Path(directory), layout, sparse=False) as descriptors:
        for item in sorted(items, key=lambda item: layout.places[_tensor_names(item)[0]][0]):
            packed = item.make()
            tensors = [packed.data] if packed.scale is None else [packed.data, packed.scale]
            for name, tensor in zip(_tensor_names(item), tensors, strict=True):
                _write(descriptors, layout, name, tensor)
            progress(sum(tensor.nbytes for tensor in tensors))
    return layout


def save_headers(
    directory: str | Path, entries: Sequence[tuple[str, Param, Format]], *, names: Spelling = "native"
) -> Layout:
    """Write files with exact headers and sizes whose values are holes that read as zero: for planning only.

    Raises:
        CheckpointError: the folder holds other safetensors files or a write fails.
    """
    layout = plan_layout(entries, names=names)
    with _new_files(Path(directory), layout, sparse=True):
        pass
    return layout


def _tensor_names(item: SaveItem) -> list[str]:
    if item.spec.kind not in ("matrix", "table"):
        return [item.name]
    return [f"{item.name}.weight"] + ([f"{item.name}.scale"] if item.format.block is not None else [])


def _write(descriptors: list[int], layout: Layout, name: str, tensor: torch.Tensor) -> None:
    index, place = layout.places[name]
    dtype = TORCH_DTYPES[place.tensor.dtype]
    assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, its format says {dtype}"
    data = tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data.cast("B")
    _write_all(descriptors[index], data, layout.shards[index].starts[place.tensor.name] + place.offset)


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)


@contextlib.contextmanager
def _new_files(directory: Path, layout: Layout, *, sparse: bool) -> Iterator[list[int]]:
    """Files of full size with their headers in place; named and indexed if the block ends well, gone if it does not."""
    paths = [directory / f"{shard.file}{_TEMPORARY}" for shard in layout.shards]
    index = directory / f"{INDEX_NAME}{_TEMPORARY}"
    descriptors: list[int] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(directory, layout)
        if not sparse:
            _refuse_small_disk(directory, layout)
        for path, shard in zip(paths, layout.shards, strict=True):
            descriptors.append(_create(path, shard))
        yield descriptors
        while descriptors:
            os.close(descriptors.pop())
        index.write_text(layout.index(), encoding="utf-8")
        for path in (*paths, index):
            os.replace(path, path.with_name(path.name.removesuffix(_TEMPORARY)))
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror}") from error
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        for path in (*paths, index):
            with contextlib.suppress(OSError):  # a folder that could not be made has nothing to remove
                path.unlink(missing_ok=True)


def _create(path: Path, shard: Shard) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(descriptor, shard.size)
    _write_all(descriptor, memoryview(shard.prefix), 0)
    return descriptor


def _refuse_strangers(directory: Path, layout: Layout) -> None:
    """A folder with weights of another layout would end up with two checkpoints in it."""
    ours = {shard.file for shard in layout.shards}
    strangers = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in ours)
    if strangers:
        raise CheckpointError(
            f"{directory} already holds {list_names(strangers)}; choose another folder or remove them"
        )


def _refuse_small_disk(directory: Path, layout: Layout) -> None:
    free, need = shutil.disk_usage(directory).free, sum(shard.size for shard in layout.shards)
    if need > free:
        raise CheckpointError(
            f"{directory} has {free / 1e6:,.0f} MB free, the checkpoint needs {need / 1e6:,.0f} MB; choose another "
            "disk or a smaller checkpoint"
        )
