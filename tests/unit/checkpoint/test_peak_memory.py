"""Loading holds no second copy of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spyglass.bench.load import peak_above_model
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.checkpoint.stream import BATCH_BYTES, BATCHES_AHEAD
from tests.unit.checkpoint.small_files import write_small

OWN_WORK = 40 << 20  # modules, tables and what the allocator keeps


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
def test_peak_memory_is_the_model_and_what_is_read_ahead(tmp_path: Path, packed: bool) -> None:
    write_small(
        tmp_path,
        packed=packed,
        shard_bytes=4_000_000_000,
        hidden_size=512,
        moe_intermediate_size=512,
        n_routed_experts=128 if packed else 32,
    )
    model = open_checkpoint(tmp_path).nbytes
    assert model > 180 << 20, json.dumps(model)
    above = peak_above_model(tmp_path)
    assert above < (BATCHES_AHEAD + 2) * BATCH_BYTES + OWN_WORK < model // 2 + (10 << 20)
