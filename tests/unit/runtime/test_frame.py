"""The step assembly against the definitions of the specification, row by row (spec v4 4.4, 5.1, 5.2, 5.4, 6.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.batch.types import Batch, CacheView
from spyglass.config.model import CompressorPlan, LayerPlan, RopeSpec, Rounding, TextConfig
from spyglass.runtime.frame import Frames
from spyglass.runtime.step_input import StepInput, join_inputs, sequence_input

WINDOW = 8
PAGE_ROWS = {"window": 4, "pool4": 3, "state4": 2, "pool16": 5, "state16": 7}


def _layer(index: int, ratio: int) -> LayerPlan:
    overlap = ratio == 4
    compressor = CompressorPlan(ratio=ratio, overlap=overlap, positional_bias=True, gated=True, index_keys=None)
    return LayerPlan(
        index=index,
        ratio=ratio,
        rope=RopeSpec(theta=10000.0, dim=64, yarn=None),
        compressor=compressor if ratio else None,
        kv_from=index if ratio else None,
        index_from=None,
        index_keys_from=None,
        candidates_from=None,
        router="topk",
    )


TEXT = TextConfig(
    vocab_size=32,
    hidden_size=8,
    num_attention_heads=1,
    head_dim=8,
    q_lora_rank=8,
    o_groups=1,
    o_lora_rank=8,
    sliding_window=WINDOW,
    index_n_heads=1,
    index_head_dim=8,
    index_topk=4,
    n_routed_experts=2,
    n_shared_experts=1,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
    routed_scaling_factor=1.0,
    swiglu_limit=1.0,
    hc_mult=2,
    hc_sinkhorn_iters=2,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    q_head_norm=True,
    shifted_hyper=False,
    max_position_embeddings=4096,
    layers=(_layer(0, 0), _layer(1, 4), _layer(2, 16)),
    reference_rounding=Rounding(),
)


def _step(rng: np.random.Generator, start: int, count: int, visible: np.ndarray | None = None) -> StepInput:
    tables = {
        group: rng.permutation(1000)[: (start + count) // rows + 1].astype(np.int32)
        for group, rows in PAGE_ROWS.items()
    }
    resumable = (start + rng.integers(1, count + 1, rng.integers(0, 3))).tolist() if visible is None else []
    return sequence_input(
        rng.integers(0, 32, count).astype(np.int32),
        np.full(count, -1, np.int8),
        start,
        tables,
        [count - 1],
        visible_T2=visible,
        resumable=resumable,
    )


def assemble(steps: list[StepInput]) -> tuple[Batch, CacheView]:
    frame = Frames(TEXT, PAGE_ROWS).exact(join_inputs(steps), {})
    return frame.batch, frame.cache


def _flat(step: StepInput, group: str, row: int) -> int:
    rows = PAGE_ROWS[group]
    return int(step.table_SP[group][0, row // rows]) * rows + row % rows


@pytest.mark.parametrize("seed", range(20))
def test_every_index_of_a_step_follows_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [_step(rng, int(rng.integers(0, 70)), int(rng.integers(1, 50))) for _ in range(rng.integers(1, 5))]
    batch, cache = assemble(steps)
    first = 0
    written = {4: 0, 16: 0}
    for number, step in enumerate(steps):
        start, stop = int(step.start_S[0]), int(step.stop_S[0])
        for offset in range(stop - start):
            t, position = first + offset, start + offset
            assert batch.seq_T[t] == number
            assert batch.positions_T[t] == position
            assert batch.window_lo_T[t] == max(0, position - WINDOW + 1)
            assert batch.window_hi_T[t] == position
            assert cache.window_write_T[t] == _flat(step, "window", position)
            for ratio, reach in ((4, 8), (16, 16)):
                pool = cache.compression[ratio]
                assert pool.phase_T[t] == position % ratio
                assert pool.visible_T[t] == sum((w + 1) * ratio <= position + 1 for w in range(position + 1))
                kept = any(end - reach <= position < end for end in (stop, *(place for _, place in step.resumable)))
                assert pool.state_write_T is not None
                assert pool.state_write_T[t] == (_flat(step, f"state{ratio}", position) if kept else -1)
        for ratio, reach in ((4, 8), (16, 16)):
            pool = cache.compression[ratio]
            for entry in range(start // ratio, stop // ratio):
                p = written[ratio]
                written[ratio] += 1
                assert pool.positions_P[p] == entry * ratio
                assert pool.write_P[p] == _flat(step, f"pool{ratio}", entry)
                for b, token in enumerate(range((entry + 1) * ratio - reach, (entry + 1) * ratio)):
                    source = int(pool.sources_PB[p, b])
                    if token < 0:
                        assert source == -1
                    elif token >= start:
                        assert source == first + token - start
                    else:
                        assert source == -2 - _flat(step, f"state{ratio}", token)
        assert batch.logit_rows_R[number] == first + stop - start - 1
        first += stop - start
    assert {ratio: len(pool.write_P) for ratio, pool in cache.compression.items()} == written
    assert batch.window_width == int((batch.window_hi_T - batch.window_lo_T).max()) + 1


def test_a_span_sees_its_end_and_the_whole_window_before_it() -> None:
    rng = np.random.default_rng(0)
    visible = np.zeros((20, 2), np.int32)
    for i in range(3, 16):
        visible[i] = i - 3, 15 - i
    batch, _ = assemble([_step(rng, 0, 20, visible)])
    for i in range(20):
        seen = {j for j in range(20) if 0 <= i - j < WINDOW or (3 <= i <= 15 and 3 <= j <= 15)}
        assert set(range(int(batch.window_lo_T[i]), int(batch.window_hi_T[i]) + 1)) == seen


def test_a_row_in_a_page_already_taken_back_is_our_bug_and_is_caught() -> None:
    step = _step(np.random.default_rng(0), 9, 3)
    step.table_SP["window"][:] = -1
    with pytest.raises(AssertionError, match="page"):
        assemble([step])


def test_a_chunk_may_not_end_inside_a_span() -> None:
    visible = np.zeros((4, 2), np.int32)
    visible[3] = 0, 1
    with pytest.raises(AssertionError, match="span"):
        assemble([_step(np.random.default_rng(0), 0, 4, visible)])


def test_a_step_without_pictures_or_adapters_says_so() -> None:
    batch, _ = assemble([_step(np.random.default_rng(0), 0, 4)])
    assert batch.image_index_T is None and batch.adapter_T is None and not batch.has_images
    assert batch.positions_T.dtype == torch.int32
