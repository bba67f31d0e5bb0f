"""Small checkpoints on disk, and ways to damage them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spyglass.checkpoint.layout import Layout, Spelling
from spyglass.checkpoint.load import LoadReport, load_into
from spyglass.checkpoint.match import Part
from spyglass.checkpoint.random import random_item
from spyglass.checkpoint.safetensors import DTYPE_BYTES, INDEX_NAME, open_checkpoint
from spyglass.checkpoint.save import save_checkpoint
from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config, read_model_config
from spyglass.params.table import Param, draft_params, param_table
from spyglass.quant.formats import BF16
from spyglass.quant.packed import Packed, WeightSlot
from tests.small_models import SMALL

PACKED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
    },
}
DRAFT = {
    "num_nextn_predict_layers": 3,
    "dspark_markov_rank": 8,
    "dspark_target_layer_ids": [1, 2, 3],
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
}


def write_small(
    directory: Path,
    *,
    packed: bool = True,
    draft: bool = False,
    seed: int = 0,
    names: Spelling = "native",
    shard_bytes: int = 30_000,
    **changes: Any,
) -> Layout:
    """A whole checkpoint of a few hundred kilobytes; packed with 32 x 32 blocks, several files."""
    values = {**SMALL, **PACKED, **(DRAFT if draft else {}), **changes}
    config = parse_model_config(values, "small")
    specs = param_table(config) | (draft_params(config, "dspark") if draft else {})
    items = [random_item(name, spec, seed=seed, format=stored_as(spec, packed)) for name, spec in specs.items()]
    layout = save_checkpoint(directory, items, names=names, shard_bytes=shard_bytes)
    if not packed:
        values = {key: value for key, value in values.items() if key not in PACKED}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return layout


def stored_as(spec: Param, packed: bool) -> Any:
    return spec.format if packed or spec.kind != "matrix" else BF16


def load_all(directory: Path, *, skip: Iterable[Part] = ("draft",)) -> tuple[dict[str, Packed], LoadReport]:
    """Every entry of the configuration as loaded, with the report."""
    kept: dict[str, Packed] = {}
    specs = wanted(read_model_config(directory), skip)

    def keeper(name: str) -> Callable[[Packed], None]:
        return lambda found: kept.__setitem__(name, found)

    slots = [WeightSlot(name, spec.shape, spec.kind, keeper(name), spec.optional) for name, spec in specs.items()]
    return kept, load_into(slots, directory, skip=skip, progress=False)


def wanted(config: ModelConfig, skip: Iterable[Part]) -> dict[str, Param]:
    specs = param_table(config)
    return {name: spec for name, spec in specs.items() if spec.component == "text" or "vision" not in skip}


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_raw(directory: Path) -> dict[str, Raw]:
    """Every tensor of a folder."""
    return {
        name: Raw(header.dtype, header.shape, header.file.read_bytes()[header.start : header.start + header.nbytes])
        for name, header in open_checkpoint(directory).tensors.items()
    }


def write_raw(directory: Path, tensors: Mapping[str, Raw], files: int = 1) -> None:
    """Replace the folder's weights by `tensors`, dealt out over some files in turn."""
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        mine = dict(list(tensors.items())[number::files])
        write_file(directory / file, entries_of(mine), b"".join(raw.data for raw in mine.values()))
        weight_map |= dict.fromkeys(mine, file)
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def entries_of(tensors: Mapping[str, Raw]) -> dict[str, Any]:
    """Header entries of tensors that follow one another."""
    entries, end = {}, 0
    for name, raw in tensors.items():
        assert len(raw.data) == DTYPE_BYTES[raw.dtype] * math.prod(raw.shape), name
        entries[name] = {"dtype": raw.dtype, "shape": list(raw.shape), "data_offsets": [end, end + len(raw.data)]}
        end += len(raw.data)
    return entries


def write_file(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file with any header: an object to be written as JSON, or the header's bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
