"""Tables on disk: values of every stored form, placements, gathers of any size, and files that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from spyglass.config import ModelConfig, read_model_config
from spyglass.engram import EngramStore, Placement, open_engram
from spyglass.errors import CheckpointError, ConfigError
from tests.engram_values import rows_of, values

START = np.full(3, -1, np.int32)


@pytest.fixture
def config(golden: Path, tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_bytes((golden / "configs" / "v41.json").read_bytes())
    (tmp_path / "engram_token_map.json").write_text(json.dumps([token * 7 % 400 for token in range(512)]))
    return read_model_config(tmp_path)


def tables(config: ModelConfig, form: str) -> dict[str, torch.Tensor]:
    """Random tables of both layers in one of the stored forms."""
    engram = config.text.engram
    assert engram is not None
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(3)
    for layer, rows in zip(engram.layers, engram.num_rows, strict=True):
        name = f"layers.{layer}.engram.embed"
        values = torch.randn(rows, engram.head_dim, generator=generator)
        if form == "fp8":
            made[f"{name}.weight"] = values.to(torch.float8_e4m3fn)
            exponent = torch.randint(110, 140, (rows, 1), generator=generator, dtype=torch.uint8)
            made[f"{name}.scale"] = exponent.view(torch.float8_e8m0fnu)
        else:
            made[f"{name}.weight"] = values.to(torch.bfloat16 if form == "bf16" else torch.float32)
    return made


def store(
    folder: Path, config: ModelConfig, made: dict[str, torch.Tensor], placement: Placement = "mmap"
) -> EngramStore:
    save_file(made, folder / "model.safetensors")
    return open_engram(folder, config, placement=placement)


def values_of(made: dict[str, torch.Tensor], layer: int) -> NDArray[Any]:
    """The whole table in fp32, by torch's own conversions."""
    weight = made[f"layers.{layer}.engram.embed.weight"].float()
    scale = made.get(f"layers.{layer}.engram.embed.scale")
    return (weight if scale is None else weight * scale.float()).numpy()


@pytest.mark.parametrize("form", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("placement", ["mmap", "host", "device"])
def test_rows_are_the_tables_values_wherever_they_lie(
    config: ModelConfig, tmp_path: Path, form: str, placement: Placement
) -> None:
    made = tables(config, form)
    opened = store(tmp_path, config, made, placement)
    ids, kinds = np.arange(100, 160, dtype=np.int32), np.full(60, -1, np.int8)
    wanted = opened.row_ids(ids, kinds, START[None], np.array([0, 60], np.int32))
    got = rows_of(opened, ids, kinds, START)
    for layer in (1, 3):
        assert np.array_equal(got[layer], values_of(made, layer)[wanted[layer]].reshape(60, -1))
    assert opened.nbytes == sum(tensor.nbytes for tensor in made.values())


def test_large_gathers_equal_small_ones(config: ModelConfig, tmp_path: Path) -> None:
    opened = store(tmp_path, config, tables(config, "fp8"))
    ids, kinds = np.arange(4096, dtype=np.int32) % 499, np.full(4096, -1, np.int8)
    whole = rows_of(opened, ids, kinds, START)
    for first in (0, 5, 4090):
        back = np.array([ids[first - step] if first >= step else -1 for step in (1, 2, 3)], np.int32)
        part = rows_of(opened, ids[first : first + 6], kinds[first : first + 6], back)
        assert all(np.array_equal(part[layer], whole[layer][first : first + 6]) for layer in (1, 3))


def test_every_byte_of_a_table_has_its_value(config: ModelConfig, tmp_path: Path) -> None:
    made = tables(config, "fp8")
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    made["layers.1.engram.embed.weight"].view(torch.uint8)[:8] = codes
    made["layers.1.engram.embed.scale"].view(torch.uint8)[:8, 0] = torch.tensor([0, 1, 100, 127, 128, 254, 255, 127])
    table = store(tmp_path, config, made).tables[1]
    got = values(table[np.arange(8)])
    assert np.array_equal(got, values_of(made, 1)[:8], equal_nan=True)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no table", r"layers\.3\.engram\.embed\.weight.*no shard"),
        ("no scale", r"layers\.3\.engram\.embed\.scale is missing"),
        ("short table", r"layers\.3\.engram\.embed\.weight is F8_E4M3 \[6331, 32\]"),
        ("short scale", r"layers\.3\.engram\.embed\.scale is F8_E8M0 \[6331, 1\]"),
        ("half", r"layers\.3\.engram\.embed\.weight is F16"),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_name(
    config: ModelConfig, tmp_path: Path, fault: str, message: str
) -> None:
    made, name = tables(config, "fp8"), "layers.3.engram.embed"
    weight, scale = made.pop(f"{name}.weight"), made.pop(f"{name}.scale")
    made |= {
        "no table": {},
        "no scale": {f"{name}.weight": weight},
        "short table": {f"{name}.weight": weight[:-1].contiguous(), f"{name}.scale": scale},
        "short scale": {f"{name}.weight": weight, f"{name}.scale": scale[:-1].contiguous()},
        "half": {f"{name}.weight": weight.to(torch.float16)},
    }[fault]
    with pytest.raises(CheckpointError, match=message):
        store(tmp_path, config, made)


def test_wrong_table_sizes_are_refused_before_files_are_opened(config: ModelConfig, tmp_path: Path) -> None:
    engram = config.text.engram
    assert engram is not None
    wrong = replace(config, text=replace(config.text, engram=replace(engram, num_rows=(6126, 1))))
    with pytest.raises(ConfigError, match="engram_num_embeddings"):
        open_engram(tmp_path, wrong)


def test_tables_are_found_under_transformers_names(config: ModelConfig, tmp_path: Path) -> None:
    made = tables(config, "fp8")
    renamed = {f"model.{name}".replace(".scale", ".weight_scale_inv"): tensor for name, tensor in made.items()}
    opened = store(tmp_path, config, renamed)
    assert np.array_equal(values(opened.tables[1][np.arange(9)]), values_of(made, 1)[:9])
