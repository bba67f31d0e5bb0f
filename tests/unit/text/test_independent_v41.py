"""Every V4.1 layer against a second implementation, given the same inputs: plain and rounded, fp32 and bf16.

Selection is tight (5 of up to 90 entries, 4 blocks of 3), so wrong indices show at once. With rounding on, a sum in
another order may flip a code now and then: nearly all elements must agree closely, and none be off by much.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spyglass.model import VisionLanguageModel
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import fp8
from spyglass.quant.packed import Packed
from spyglass.runtime.frame import Frames
from spyglass.runtime.step_input import sequence_input
from spyglass.text.step import Step, make_step
from spyglass.text.v41 import V41Layer
from tests.driver import Memory
from tests.engram_values import rows_of
from tests.independent_v41 import Independent, Rounding
from tests.independent_v41 import Memory as SharedMemory
from tests.small_models import build_model, empty_model, random_text, random_weights
from tests.small_v41 import SMALL_V41, small_store, small_v41_config

CHANGES = {"head_dim": 80, "hidden_size": 96, "index_head_dim": 48, "q_lora_rank": 40, "engram_head_dim": 32}
LENGTH, PICTURE = 90, range(20, 33)
MODES = {
    "plain": (torch.float32, "plain", Rounding()),
    "quantised": (torch.float32, "reference", Rounding(quantise=True)),
    "bf16": (torch.bfloat16, "reference", Rounding(quantise=True, bf16=True)),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One mode: both implementations, one step of a sequence with a picture in it, and the streams it starts with."""

    mode: str
    model: VisionLanguageModel
    other: Independent
    step: Step
    cache: Any
    streams: torch.Tensor
    picture: NDArray[np.bool_]
    engram: dict[int, torch.Tensor]

    def same(self, ours: torch.Tensor, theirs: Any, label: str) -> None:
        got, want = ours.double().numpy(), np.asarray(theirs)
        assert got.shape == want.shape, label
        off, scale = np.abs(got - want), np.abs(want).max()
        close = {"plain": 1e-5, "quantised": 1e-5, "bf16": 2.0**-8}[self.mode] * scale
        share = 1.0 if self.mode == "plain" else 0.99
        agree = (off <= close).mean()
        assert agree >= share, f"{label}: only {agree:.4f} of the elements agree; worst {off.max() / scale:.4f}"
        assert off.max() <= 0.1 * scale, f"{label}: {off.max() / scale:.4f} of the largest value"


def packed_v41(weights: dict[str, Packed]) -> dict[str, Packed]:
    """What the release stores as FP8 in blocks of 32 x 32, the engram projection included."""
    result = {}
    for name, packed in weights.items():
        is_fp8 = packed.format.name == "fp8" or name.endswith("engram.wkv")
        result[name] = encode(decode(packed, torch.float32), fp8((32, 32))) if is_fp8 else packed
    return result


def values_of(packed: Packed) -> NDArray[np.float64]:
    plain = packed.data if packed.format.block is None else decode(packed, torch.float32)
    return plain.double().numpy()


@pytest.fixture(scope="module", params=[(mode, ops) for mode in MODES for ops in ("reference", "auto")])
def setting(request: pytest.FixtureRequest) -> Setting:
    mode, which = request.param
    dtype, numerics, rounding = MODES[mode]
    ops = bind_ops("cpu", str(dtype).removeprefix("torch."), which)
    config = small_v41_config(**CHANGES)
    weights = packed_v41(random_weights(empty_model(config).slots(), seed=4, packed=True))
    model = build_model(config, weights, dtype=dtype, numerics=numerics, ops=ops, expand=False)
    other = Independent(
        text=SMALL_V41["text_config"] | CHANGES,
        weights={name: values_of(packed) for name, packed in weights.items()},
        packed={name for name, packed in weights.items() if packed.format.block is not None},
        rounding=rounding,
    )
    kinds = np.full(LENGTH, -1, np.int8)
    kinds[PICTURE] = 2
    ids = np.where(kinds >= 0, -1, random_text(LENGTH)).astype(np.int32)
    memory = Memory(text=config.text, dtype=dtype, sequences=1, length=LENGTH)
    rows = sequence_input(ids, kinds, 0, memory.tables[0], [])
    frame = Frames(config.text, memory.page_rows).exact(rows, memory.pages)
    batch, cache = frame.batch, frame.cache
    engram = {
        layer: torch.from_numpy(found).to(torch.bfloat16).to(dtype)
        for layer, found in rows_of(small_store(config), ids, kinds, np.full(3, -1, np.int32)).items()
    }
    batch = replace(batch, engram_rows=engram)
    text = model.text
    streams = torch.from_numpy(np.random.default_rng(5).normal(size=(LENGTH, 3, 96))).to(torch.bfloat16).to(dtype)
    return Setting(
        mode=mode,
        model=model,
        other=other,
        step=make_step(batch, cache, text.ropes, config.text.layers),
        cache=cache,
        streams=streams,
        picture=kinds >= 0,
        engram=engram,
    )


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What both made of each layer, given our outputs of the layer before: (streams, read weights)."""

    ours: list[tuple[torch.Tensor, torch.Tensor]]
    theirs: list[tuple[Any, Any]]
    shared: SharedMemory


@pytest.fixture(scope="module")
def ran(setting: Setting) -> Ran:
    """Inputs are ours throughout, so that differences do not add up."""
    result = Ran(ours=[], theirs=[], shared=SharedMemory())
    streams, pre = setting.streams, torch.zeros(LENGTH, 3)
    pre[:, 0] = 1
    with torch.inference_mode():
        for index, layer in enumerate(setting.model.text.layers):
            assert isinstance(layer, V41Layer)
            engram = setting.engram.get(index)
            rows = None if engram is None else engram.double().numpy()
            given = (streams.double().numpy(), pre.double().numpy(), result.shared, setting.picture, rows)
            result.theirs.append(setting.other.layer(index, *given))
            streams, pre = layer(layer.recall(streams, setting.step), pre, setting.step, setting.cache)
            result.ours.append((streams, pre))
    return result


def test_every_layer_agrees_given_the_same_inputs(setting: Setting, ran: Ran) -> None:
    for index, (ours, theirs) in enumerate(zip(ran.ours, ran.theirs, strict=True)):
        setting.same(ours[0], theirs[0], f"streams after layer {index}")
        setting.same(ours[1], theirs[1], f"read weights after layer {index}")


def test_the_head_agrees(setting: Setting, ran: Ran) -> None:
    streams, pre = ran.ours[-1]
    with torch.inference_mode():
        normed = setting.model.text.norm(setting.model.options.build.ops.hyper_collapse(streams, pre))
        logits = setting.model.logits(normed, torch.arange(LENGTH))
    setting.same(logits, setting.other.logits(streams.double().numpy(), pre.double().numpy()), "logits")


def test_the_choices_are_the_same_sets(setting: Setting, ran: Ran) -> None:
    """Picks of all three indexers and the candidate blocks, query by query; bf16 scores tie at the cut."""
    differing = {"plain": 0, "quantised": 2, "bf16": LENGTH // 3}[setting.mode]
    assert sorted(ran.shared.topk_indices) == [2, 5, 7]
    for source, expected in ran.shared.topk_indices.items():
        topk_indices = setting.step.choices.topk_indices[source]
        assert topk_indices is not None
        got = [[entry for entry in row if entry >= 0] for row in topk_indices.tolist()]
        assert sum(mine != other for mine, other in zip(got, expected, strict=True)) <= differing, source
    blocks = setting.step.choices.blocks[5]
    assert blocks is not None
    got_candidates = [
        {3 * block + offset for block in row if block >= 0 for offset in range(3) if 3 * block + offset <= t}
        for t, row in enumerate(blocks.tolist())
    ]
    assert sum(mine != other for mine, other in zip(got_candidates, ran.shared.candidates, strict=True)) <= differing


def test_the_candidates_decide_something(setting: Setting, ran: Ran) -> None:
    """Without them the later indexer would pick entries outside; else this file would not test them."""
    allowed = ran.shared.candidates
    first = ran.shared.topk_indices[5]
    assert any(set(topk_indices) - candidates for topk_indices, candidates in zip(first, allowed, strict=True))
    assert all(
        set(topk_indices) <= candidates
        for topk_indices, candidates in zip(ran.shared.topk_indices[7], allowed, strict=True)
    )
