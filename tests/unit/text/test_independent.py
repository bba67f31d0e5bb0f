"""Every layer against a second implementation, given the same inputs: plain and rounded, fp32 and bf16.

With rounding on, a sum in another order may flip a code now and then, so a stage must agree exactly (fp32: closely) in
nearly all elements, and nowhere by more than a flipped code can do. A wrong rule changes far more than that. (On the
machine these bounds were set on no code flips: stored rows and experts are equal in every bit.)
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.batch.types import Batch, CacheView
from spyglass.config.model import ModelConfig
from spyglass.model import VisionLanguageModel
from spyglass.ops.declare import Ops
from spyglass.ops.table import OPS, bind_ops
from spyglass.quant.codec import decode
from spyglass.quant.packed import Packed
from spyglass.text.hyper import Residual
from spyglass.text.step import Step, make_step
from spyglass.text.v4 import V4Layer
from tests.driver import Part, Tokens, build_step, memory_for, prefill
from tests.independent_v4 import IndependentV4
from tests.small_models import (
    HOST_AND_GPU,
    SMALL,
    build_model,
    empty_model,
    prompt_with_pictures,
    random_weights,
    small_config,
)
from tests.tolerance import LAW_OF_MAX

# head_dim 88: two blocks of 64 and 16 plain channels, 8 rotary; index rows of two blocks of 32
VALUES = SMALL | {"head_dim": 88, "index_head_dim": 64, "index_n_heads": 16, "index_topk": 6}
PIECES = [9, (2, 12), (1, 5), 101]
MODES = {
    "plain fp32": (torch.float32, "plain"),
    "fp32": (torch.float32, "reference"),
    "bf16": (torch.bfloat16, "reference"),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One mode: our model, the other one, a prompt, and what one step of it looks like."""

    model: VisionLanguageModel
    other: IndependentV4
    tokens: Tokens
    batch: Batch
    cache: CacheView
    step: Step
    recorded: dict[str, list[Any]]
    spans: list[tuple[int, int]]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def layer(self, index: int) -> V4Layer:
        found = self.model.text.layers[index]
        assert isinstance(found, V4Layer)
        return found

    def same(self, ours: torch.Tensor, theirs: Any, label: str, share: float = 0.998, worst: float = 0.03) -> None:
        """Nearly all elements equal, none off by more than `worst` of the largest."""
        got = ours.double().cpu().numpy()
        want = np.asarray(theirs)
        assert got.shape == want.shape, (label, got.shape, want.shape)
        bound = 0.0 if self.other.bf16 else 2e-5
        scale = np.abs(want).max()
        off = np.abs(got - want)
        if not self.other.rounded:
            share, worst = 1.0, 2e-5
        agree = (off <= bound * scale).mean()
        assert agree >= share, f"{label}: only {agree:.4f} of the elements agree"
        assert off.max() <= worst * scale, f"{label}: {off.max() / scale:.4f} of the largest value"


def values_of(weights: dict[str, Packed]) -> dict[str, Any]:
    return {
        name: (decode(packed, torch.float32) if packed.format.block else packed.data).double().numpy()
        for name, packed in weights.items()
    }


def recording(ops: Ops, recorded: dict[str, list[Any]]) -> Ops:
    """The same ops; inputs, output and options of every call are kept."""

    def recorder(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            out = getattr(ops, name)(*args, **kwargs)
            recorded.setdefault(name, []).append((args, out, kwargs))
            return out

        return call

    return ops.replaced(**{name: recorder(name) for name in OPS})


@pytest.fixture(scope="module", params=HOST_AND_GPU)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(MODES))
def setting(request: pytest.FixtureRequest, device: str) -> Setting:
    dtype, numerics = MODES[request.param]
    config = small_config(**VALUES)
    weights = random_weights(empty_model(config).slots(), seed=4, packed=True)
    recorded: dict[str, list[Any]] = {}
    ops = recording(bind_ops(device, str(dtype).removeprefix("torch."), "reference"), recorded)
    model = build_model(config, weights, dtype=dtype, numerics=numerics, ops=ops, expand=False, device=device)
    other = IndependentV4(
        config=VALUES,
        weights=values_of(weights),
        packed=frozenset(name for name, p in weights.items() if p.format.block is not None),
        bf16=dtype == torch.bfloat16,
        rounded=numerics == "reference",
    )
    tokens = prompt_with_pictures(PIECES, config)
    batch, cache, _ = build_step(memory_for(model, 1, len(tokens)), [Part(sequence=0, tokens=tokens, start=0)])
    starts, ends = np.flatnonzero(tokens.kinds_T == 0), np.flatnonzero(tokens.kinds_T == 4)
    return Setting(
        model=model,
        other=other,
        tokens=tokens,
        batch=batch,
        cache=cache,
        step=make_step(batch, cache, model.text.ropes, config.text.layers),
        recorded=recorded,
        spans=[(int(s), int(e)) for s, e in zip(starts, ends, strict=True)],
    )


def given(setting: Setting, seed: int, *shape: int) -> tuple[torch.Tensor, Any]:
    """Random input of a stage: ours in the activation dtype, theirs the same numbers."""
    build = setting.model.options.build
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(build.dtype)
    return x.to(build.device), x.double().numpy()


def stored(setting: Setting, kind: str, group: str, layer: int, count: int) -> torch.Tensor:
    """The first `count` rows of the sequence in one cache tensor."""
    pages, table = setting.cache.pages[kind, layer], setting.cache.table_SP[group][0]
    rows = torch.arange(count, device=pages.device)
    flat = table[rows // pages.shape[1]].long() * pages.shape[1] + rows % pages.shape[1]
    return pages.flatten(0, 1)[flat]


LAYERS = range(4)


@pytest.mark.parametrize("layer", LAYERS)
@torch.inference_mode()
def test_attention_agrees_stage_by_stage(layer: int, setting: Setting) -> None:
    config = setting.config.text
    count, plan = len(setting.tokens), config.layers[layer]
    x, theirs = given(setting, layer, count, config.hidden_size)
    want = setting.other.attention(layer, theirs, setting.spans)
    attention = setting.layer(layer).attn
    setting.recorded.clear()
    out = attention(x, setting.step, setting.cache)
    setting.same(stored(setting, "window", "window", layer, count), want.window, "window rows")
    if plan.ratio:
        entries = stored(setting, "pool", f"pool{plan.ratio}", layer, count // plan.ratio)
        setting.same(entries, want.entries, "compressed rows")
    if plan.ratio == 4:
        setting.same(stored(setting, "index", "pool4", layer, count // 4), want.keys, "index keys")
        (_, weights, *_), topk_indices, options = setting.recorded["index_topk"][0]
        setting.same(
            weights * options["weight_scale"], setting.other.index_weights(layer, theirs), "head weights of the index"
        )
        rows = [[int(pick) for pick in row if pick >= 0] for row in topk_indices]
        same = np.mean([mine == theirs for mine, theirs in zip(rows, want.topk_indices, strict=True)])
        assert same >= (0.97 if setting.other.rounded else 1.0), f"only {same:.3f} of the rows pick alike"
    heads = setting.recorded["linear_grouped"][0][0][0].flatten(1)
    setting.same(heads, want.heads.reshape(count, -1), "heads", 0.98, 0.02)
    setting.same(out, want.out, "output", 0.95, 0.05)


@pytest.mark.parametrize("layer", LAYERS)
@torch.inference_mode()
def test_experts_agree(layer: int, setting: Setting) -> None:
    config = setting.config.text
    x, theirs = given(setting, 10 + layer, len(setting.tokens), config.hidden_size)
    setting.recorded.clear()
    out = setting.layer(layer).ffn(x, setting.step)
    ids, kinds = setting.tokens.ids_T.tolist(), setting.tokens.kinds_T.tolist()
    chosen, weights = (out.cpu() for out in setting.recorded["router_topk"][0][1])
    for t, (token, kind) in enumerate(zip(ids, kinds, strict=True)):
        want, share = setting.other.route(layer, theirs[t], token, kind)
        order, expected = chosen[t].argsort(), np.argsort(want)
        assert chosen[t][order].tolist() == sorted(want)
        np.testing.assert_allclose(weights[t][order].numpy(), share[expected], rtol=1e-5)
    setting.same(out, setting.other.experts(layer, theirs, ids, kinds), "experts", 0.99, 0.05)


@pytest.mark.parametrize("layer", LAYERS)
@torch.inference_mode()
def test_hyper_connections_agree(layer: int, setting: Setting) -> None:
    config = setting.config.text
    streams, theirs = given(setting, 20 + layer, 30, config.hc_mult, config.hidden_size)
    z, other_z = given(setting, 30 + layer, 30, config.hidden_size)
    for name in ("hc_attn", "hc_ffn"):
        connection, norm = getattr(setting.layer(layer), name), getattr(setting.layer(layer), f"{name[3:]}_norm")
        x, _, pre, residual = connection.read(Residual(streams), norm)
        want = setting.other.mix(theirs, f"layers.{layer}.{name}")
        for ours, expected in zip((pre, residual.post_TM, residual.comb_TMM), want, strict=True):
            np.testing.assert_allclose(ours.cpu().numpy(), expected, rtol=2e-5, atol=1e-6)
        collapsed = setting.other.norm(setting.other.collapse(theirs, want[0]), f"layers.{layer}.{name[3:]}_norm")
        setting.same(x, collapsed, "read")
        expanded = setting.other.expand(other_z, theirs, *want[1:])
        written = residual.given(z)
        setting.same(written.written(setting.model.options.build.ops), expanded, "written")
        x, _, pre, residual = connection.read(written, norm)
        setting.same(residual.streams_TMC, expanded, "written and read")


@torch.inference_mode()
def test_the_last_collapse_agrees(setting: Setting) -> None:
    """Streams so small, and epsilons so big, that both epsilons show."""
    values = VALUES | {"rms_norm_eps": 0.02, "hc_eps": 0.3}
    config = small_config(**values)
    build = setting.model.options.build
    weights = random_weights(empty_model(config).slots(), seed=6)
    model = build_model(config, weights, dtype=build.dtype, device=build.device.type)
    other = IndependentV4(config=values, weights=values_of(weights), bf16=build.dtype == torch.bfloat16)
    streams, theirs = given(setting, 50, 30, config.text.hc_mult, config.text.hidden_size)
    setting.same(model.text.hc_head(streams / 8), other.last_collapse(theirs / 8), "last collapse", 0.99, 0.01)


@torch.inference_mode()
def test_whole_layers_agree_given_their_input(setting: Setting) -> None:
    """The order of the parts: most elements of a layer's output agree; in plain arithmetic all do."""
    config = setting.config.text
    ids, kinds = setting.tokens.ids_T.tolist(), setting.tokens.kinds_T.tolist()
    for layer in LAYERS:
        streams, theirs = given(setting, 40 + layer, len(ids), config.hc_mult, config.hidden_size)
        ours = setting.layer(layer)(streams, setting.step, setting.cache)
        want = setting.other.layer(layer, theirs, ids, kinds, setting.spans)
        row = np.abs(ours.double().cpu().numpy() - want).max(axis=(1, 2)) / np.abs(want).max()
        if setting.other.rounded:
            assert np.median(row) < 0.01, f"layer {layer}: {np.median(row)}"
        else:
            assert row.max() < 2e-5, f"layer {layer}: {row.max()}"


def test_index_picks_change_when_the_hadamard_is_deleted() -> None:
    """It cancels in exact arithmetic; before FP4 rounding it decides which entries are picked."""
    topk_indices = {}
    for numerics in ("reference", "plain"):
        for hadamard in (True, False):
            recorded: dict[str, list[Any]] = {}
            config = small_config(**VALUES)
            rounding = dataclasses.replace(config.text.reference_rounding, hadamard=hadamard)
            config = dataclasses.replace(config, text=dataclasses.replace(config.text, reference_rounding=rounding))
            weights = random_weights(empty_model(config).slots(), seed=4, packed=True)
            ops = recording(bind_ops("cpu", "float32", "reference"), recorded)
            model = build_model(config, weights, numerics=numerics, ops=ops)
            prefill(model, prompt_with_pictures(PIECES, config))
            topk_indices[numerics, hadamard] = recorded["index_topk"][0][1]
    changed = (topk_indices["reference", True] != topk_indices["reference", False]).any(dim=1).float().mean()
    assert changed > 0.2, f"only {changed:.2f} of the rows pick otherwise without it"
    assert torch.equal(topk_indices["plain", True], topk_indices["plain", False])
    assert not torch.equal(topk_indices["plain", True], topk_indices["reference", True])


def test_plain_logits_agree_from_embeddings_to_head() -> None:
    config = small_config(**VALUES)
    weights = random_weights(empty_model(config).slots(), seed=4, packed=True)
    model = build_model(config, weights)
    other = IndependentV4(config=VALUES, weights=values_of(weights))
    tokens = prompt_with_pictures(PIECES, config)
    batch, _, rows = build_step(memory_for(model, 1, len(tokens)), [Part(sequence=0, tokens=tokens, start=0)])
    merged = merged_rows(weights, tokens)
    torch.testing.assert_close(model.embed(batch, rows)[:, 1].double(), torch.from_numpy(merged), rtol=0, atol=0)
    starts, ends = np.flatnonzero(tokens.kinds_T == 0), np.flatnonzero(tokens.kinds_T == 4)
    spans = [(int(s), int(e)) for s, e in zip(starts, ends, strict=True)]
    want = other.logits(merged, tokens.ids_T.tolist(), tokens.kinds_T.tolist(), spans)
    off = np.abs(prefill(model, tokens).double().numpy() - want).max()
    assert off <= 2 * LAW_OF_MAX * np.abs(want).max(), off


def merged_rows(weights: dict[str, Packed], tokens: Tokens) -> Any:
    """Embeddings with picture rows in their places (spec 9.7)."""
    table = values_of(weights)
    vectors = {0: "image_start", 1: "image_pad", 3: "image_newline", 4: "image_end"}
    out = []
    for t in range(len(tokens)):
        kind = int(tokens.kinds_T[t])
        if kind < 0:
            out.append(table["embed"][tokens.ids_T[t]])
        elif kind == 2:
            assert tokens.image_rows is not None
            out.append(tokens.image_rows[tokens.image_row_T[t]].double().numpy())
        else:
            out.append(table[vectors[kind]])
    return np.array(out)
