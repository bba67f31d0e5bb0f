"""Where DeepSeek-V4.1 fits, with its tables in files, in host memory or on the GPUs (spec v41 2.3, 4.6, 5.6)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from spyglass.checkpoint.match import Source
from spyglass.checkpoint.safetensors import DTYPE_BYTES, TensorHeader
from spyglass.config.model import ModelConfig
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.machine import Device, Machine
from spyglass.params.table import param_table, stored_tensors
from spyglass.plan import USABLE, MemoryPlan, cache_bytes, plan_memory

GB = 10**9
TABLES = 202_758_032_400


def sources_of(config: ModelConfig) -> dict[str, Source]:
    """What a complete checkpoint of the official format would be matched to, without its files."""
    found = {}
    for name, spec in param_table(config).items():
        headers = [
            TensorHeader(tensor, dtype, shape, Path(), 0, DTYPE_BYTES[dtype] * math.prod(shape))
            for tensor, dtype, shape in stored_tensors(name, spec, spec.format)
        ]
        found[name] = Source(spec.format, headers[0], headers[1] if len(headers) > 1 else None)
    return found


@pytest.fixture(scope="module")
def flash() -> MemoryPlan:
    config = parse_model_config(preset_config("v41-flash", packed=True), "flash")
    machine = Machine(Device("host", 900 * GB, 587 * GB), tuple(Device("card", 150 * GB, 150 * GB) for _ in range(4)))
    return plan_memory(config, sources_of(config), machine, packed=True)


def test_printed_cache_sizes() -> None:
    """890 bytes a token: three pools of pairs and one of single tokens, rows of 288 and keys of 68 bytes."""
    text = parse_model_config(preset_config("v41-flash", packed=True), "flash").text
    assert cache_bytes(text, "packed").per_token == (288 + 68) / 2 * 3 + (288 + 68) == 890
    state = 3 * 2 * 4 * 2 * 512  # un-pooled fp32 rows of the three gated compressors
    assert cache_bytes(text, "packed").fixed - state == 40 * 128 * 528
    assert cache_bytes(text, "bfloat16").per_token == 2.5 * (1024 + 256)


def test_released_weights(flash: MemoryPlan) -> None:
    assert flash.weights["engram"].stored == TABLES
    assert flash.weights["experts"].stored == 40 * 384 * (17_694_720 + 1_105_920)
    assert flash.weights["vision"].stored == 970_536_960
    assert flash.total.stored == pytest.approx(296e9 + 2.65e9 + 0.97e9, rel=2e-3)


def test_where_it_fits_without_its_tables(flash: MemoryPlan) -> None:
    """300 GB: four cards of 96 or 141, not two."""
    fits = {(fit.name, fit.count): fit.context for fit in flash.gpus}
    assert fits["96 GB", 4] and fits["141 GB", 4] and fits["48 GB", 8]
    assert not fits["141 GB", 2] and not fits["192 GB", 1] and not fits["32 GB", 8]
    assert {fit.tables for fit in flash.gpus} == {"files"}


def test_tables_on_the_gpus_lie_on_one_of_them(flash: MemoryPlan) -> None:
    """203 GB and a share of the weights fit on no card of these."""
    assert not any(fit.context for fit in flash.gpus_with_tables)
    outside = {(fit.name, fit.count): fit.weights for fit in flash.gpus}
    assert {fit.weights - outside[fit.name, fit.count] for fit in flash.gpus_with_tables} == {TABLES}


def test_the_host_holds_one_copy_of_the_tables_however_many_cards(flash: MemoryPlan) -> None:
    files, memory, cards, cards_with_tables = flash.here
    assert (files.tables, memory.tables) == ("files", "host") and memory.weights - files.weights == TABLES
    assert memory.usable == int(587 * GB * USABLE) and memory.context
    assert (cards.count, cards.tables, cards_with_tables.tables) == (4, "files", "devices")
    assert cards.context and not cards_with_tables.context


def test_models_without_engram_have_no_second_table() -> None:
    config = parse_model_config(preset_config("tiny", packed=True), "tiny")
    found = plan_memory(config, sources_of(config), Machine(Device("h", GB, GB), ()), packed=True)
    assert found.gpus_with_tables == () and {fit.tables for fit in (*found.here, *found.gpus)} == {"none"}


def test_as_many_cards_are_planned_for_as_divide_the_model() -> None:
    config = parse_model_config(preset_config("v41-flash", packed=True), "v41-flash")
    machine = Machine(Device("h", GB, GB), tuple(Device("card", 150 * GB, 150 * GB) for _ in range(7)))
    assert {fit.count for fit in plan_memory(config, sources_of(config), machine, packed=True).here} == {1, 4}
