"""What is kept per sequence: windows, pools and open groups of every layer, and of which layers nothing."""

from __future__ import annotations

import pytest

from spyglass.config.cache import cache_plans
from spyglass.config.model import ModelConfig
from tests.small_models import small_config
from tests.small_v41 import small_v41_config


@pytest.mark.parametrize("config", [small_config(), small_v41_config()], ids=["v4", "v4.1"])
def test_a_layer_keeps_its_window_its_compressed_rows_and_groups_that_are_open(config: ModelConfig) -> None:
    """A token sees W rows, itself among them; (kv, gate) of groups that are not full stay in fp32 until they are."""
    text, plans = config.text, cache_plans(config.text)
    for layer in text.layers:
        mine = {plan.kind: plan for plan in plans if plan.layer == layer.index}
        kept = {"window"}
        assert (mine["window"].retention, mine["window"].row_dim) == (text.sliding_window - 1, text.head_dim)
        compressor = layer.compressor
        for source, rows, open_rows, width in (
            (compressor is not None, "pool", "state", text.head_dim),
            (compressor is not None and compressor.index_keys, "index", "index_state", text.index_head_dim),
        ):
            if compressor is None or not source:
                continue
            kept.add(rows)
            assert (mine[rows].row_dim, mine[rows].tokens_per_row) == (width, compressor.ratio)
            assert mine[rows].retention is None and not mine[rows].snapshot
            if compressor.gated and (rows == "pool" or compressor.index_keys == "compressor"):
                kept.add(open_rows)
                series = 2 if compressor.overlap else 1
                assert mine[open_rows].row_dim == 2 * series * width and mine[open_rows].dtype == "float32"
                assert mine[open_rows].retention == series * compressor.ratio and mine[open_rows].snapshot
        assert set(mine) == kept
    assert len({(plan.layer, plan.kind) for plan in plans}) == len(plans)
