"""V4.1 details that whole-model comparisons would not show: printed values, seams for adapters and drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.batch.types import Batch, CacheView
from spyglass.config import YarnScaling
from spyglass.layers.rope import rope_frequencies
from spyglass.runtime.frame import Frames
from spyglass.runtime.step_input import join_inputs, sequence_input
from spyglass.text.step import make_step
from spyglass.text.v41 import V41Layer
from tests.driver import Memory
from tests.engram_values import rows_of
from tests.small_models import random_text
from tests.small_v41 import small_store, small_v41_model
from tests.tolerance import ONE_SUM, SPEC_PRINTED, assert_close

LENGTH = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return small_v41_model(seed=2)


def one_step(model: Any, adapter_ids: tuple[int, ...] = (0,), **changes: Any) -> tuple[Batch, CacheView]:
    """A step of sequences of text, one for each adapter."""
    text = model.config.text
    memory = Memory(text=text, dtype=torch.float32, sequences=len(adapter_ids), length=LENGTH)
    ids, kinds = random_text(LENGTH).astype(np.int32), np.full(LENGTH, -1, np.int8)
    rows = [
        sequence_input(ids, kinds, 0, memory.tables[number], [], adapter_id=one)
        for number, one in enumerate(adapter_ids)
    ]
    frame = Frames(text, memory.page_rows).exact(join_inputs(rows), memory.pages)
    found = rows_of(small_store(model.config), ids, kinds, np.full(3, -1, np.int32))
    engram = {layer: torch.from_numpy(value).repeat(len(adapter_ids), 1) for layer, value in found.items()}
    return replace(frame.batch, engram_rows=engram, **changes), frame.cache


def test_the_printed_frequencies() -> None:
    """Spec v41 4.2: the ramp starts at pair 15 and ends at 25; no temperature."""
    yarn = YarnScaling(factor=16.0, original_max_position=65536, beta_fast=32.0, beta_slow=1.0)
    frequencies = rope_frequencies(160000.0, 64, yarn)
    printed = [0.0036355386, 0.002265625, 0.000296977778, 1.953125e-5, 5.68053e-7]
    assert_close(frequencies[[15, 16, 20, 24, 31]] / torch.tensor(printed), [1.0] * 5, SPEC_PRINTED)
    plain = rope_frequencies(10000.0, 64, None)
    assert_close(plain, 10000.0 ** (-2 * torch.arange(32, dtype=torch.float64) / 64), SPEC_PRINTED)


def test_captured_streams_are_those_that_enter_a_layer_with_its_memory_added(model: Any) -> None:
    """Spec v41 4.3 step 0, 8: capture comes right after the engram."""
    batch, cache = one_step(model, capture=(0, 4, 8))
    streams = model.embed(batch)
    with torch.inference_mode():
        _, captured = model.text(streams, batch, cache)
    assert sorted(captured) == [0, 4, 8] and torch.equal(captured[0], streams)
    step = make_step(batch, cache, model.text.ropes, model.config.text.layers)
    state, pre = streams, torch.zeros(LENGTH, 3)
    pre[:, 0] = 1
    with torch.inference_mode():
        for index, layer in enumerate(model.text.layers):
            assert isinstance(layer, V41Layer)
            entering = layer.recall(state, step)
            assert torch.equal(entering, state) == (index not in (1, 4))
            if index in captured:
                torch.testing.assert_close(captured[index], entering, atol=1e-6, rtol=0)
            state, pre = layer(entering, pre, step, cache)


def test_a_memory_that_nothing_asks_for_comes_in_by_the_least_gate_and_has_a_gradient(model: Any) -> None:
    """Spec v41 5.4: streams of zeros give d = 0, so the gate is σ(sqrt(1e-6)); the root alone has no slope there."""
    batch, cache = one_step(model)
    layer = model.text.layers[1]
    step = make_step(batch, cache, model.text.ropes, model.config.text.layers)
    streams = torch.zeros(LENGTH, 3, model.config.text.hidden_size, requires_grad=True)
    out = layer.recall(streams, step)
    value = layer.engram.wkv(batch.engram_rows[1])[:, -model.config.text.hidden_size :].float()
    assert_close(out, 0.50024999998 * value[:, None].expand_as(out), ONE_SUM)
    out.sum().backward()
    assert streams.grad is not None and streams.grad.isfinite().all()


class Watching:
    """An adapter that adds nothing and remembers which adapter each row came with."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.ids: list[int] = []

    def __call__(self, x_TI: torch.Tensor, adapter_T: torch.Tensor) -> torch.Tensor:
        self.ids = adapter_T.tolist()
        return torch.zeros(len(x_TI), self.width)


@pytest.mark.parametrize(("layer", "entries"), [(2, LENGTH // 2), (5, LENGTH)])
def test_pooled_rows_carry_the_adapter_of_their_sequence(model: Any, layer: int, entries: int) -> None:
    """Index keys run on latents, one row per compressed entry, not per token."""
    batch, cache = one_step(model, adapter_ids=(3, 0, 5))
    key = model.text.layers[layer].attn.indexer.wk
    key.adapter = Watching(key.out_features)
    try:
        with torch.inference_mode():
            model.text(model.embed(batch), batch, cache)
        assert key.adapter.ids == [3] * entries + [0] * entries + [5] * entries
    finally:
        key.adapter = None


def test_only_owners_have_what_makes_rows_and_keys(model: Any) -> None:
    owners = {
        name: [
            index
            for index, layer in enumerate(model.text.layers)
            if any(slot.name.endswith(name) for slot in _slots(layer))
        ]
        for name in ("compressor.wkv", "compressor.wgate", "indexer.wk", "indexer.wq_b", "engram.wkv", ".ape")
    }
    assert owners == {
        "compressor.wkv": [2, 5],
        "compressor.wgate": [2],
        "indexer.wk": [2, 5],
        "indexer.wq_b": [2, 5, 7],
        "engram.wkv": [1, 4],
        ".ape": [],
    }


def _slots(layer: torch.nn.Module) -> list[Any]:
    from spyglass.layers.build import weight_slots

    return weight_slots(layer)


def test_a_reindex_layer_has_index_weights_of_its_own(model: Any) -> None:
    """Layer 7 scores the keys of layer 5 with queries and weights of its own: others there, others there alone."""
    batch, cache = one_step(model)

    def topk_indices() -> dict[int, Any]:
        step = make_step(batch, cache, model.text.ropes, model.config.text.layers)
        state, pre = model.embed(batch), torch.zeros(LENGTH, 3)
        pre[:, 0] = 1
        with torch.inference_mode():
            for layer in model.text.layers:
                state, pre = layer(layer.recall(state, step), pre, step, cache)
        return step.choices.topk_indices

    first = topk_indices()
    assert sorted(first) == [2, 5, 7]
    weight = model.text.layers[7].attn.indexer.weights_proj.weight
    weight.data.neg_()
    changed = topk_indices()
    weight.data.neg_()
    assert torch.equal(first[5], changed[5]) and not torch.equal(first[7], changed[7])
