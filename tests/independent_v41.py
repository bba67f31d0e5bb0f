"""A second V4.1 backbone, written from the specification alone: one sequence, all at once, numpy, no cache.

It reads the JSON and the weights by name and shares nothing with the package. `Rounding` says which of the release's
roundings apply: none of them ("plain"), the deliberate quantisers, or bfloat16 after every step as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rounding:
    """`quantise`: the fake quantisers of spec v41 4.1. `bf16`: activations are bfloat16."""

    quantise: bool = False
    bf16: bool = False

    def act(self, x: Array) -> Array:
        return bf16(x) if self.bf16 else x

    def q(self, x: Array, kind: str) -> Array:
        return self.act(fake_quant(x, kind)) if self.quantise else x


def bf16(x: Array) -> Array:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).astype(np.float64)


E4M3 = np.array(
    sorted({(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)} | {m / 512 for m in range(8)})
)
E4M3 = E4M3[E4M3 <= 448]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_even(x: Array, grid: Array) -> Array:
    """The nearest grid value, ties to the one of even index (an even code), saturating."""
    size = np.minimum(np.abs(x), grid[-1])
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    down, up = size - low, high - size
    take_low = (down < up) | ((down == up) & ((above - 1) % 2 == 0))
    return np.copysign(np.where(take_low, low, high), x)


def ceil_pow2(x: Array) -> Array:
    """2 ** ceil(log2(x)) of float32 numbers, from their bits."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    exponent = (bits >> 23).astype(np.int64) + ((bits & 0x7FFFFF) != 0)
    return 2.0 ** (exponent - 127.0)


def fake_quant(x: Array, kind: str) -> Array:
    """A8, F4U or F4E along the last axis."""
    block = {"A8": 32, "F4U": 32, "F4E": 16}[kind]
    out = np.empty_like(x)
    for first in range(0, x.shape[-1], block):
        part = np.asarray(x[..., first : first + block], np.float32)
        top = np.abs(part).max(axis=-1, keepdims=True)
        if kind == "A8":
            scale = ceil_pow2(np.maximum(top, np.float32(1e-4)) * np.float32(1 / 448))
        elif kind == "F4U":
            scale = ceil_pow2(np.maximum(top, np.float32(6 * 2.0**-126)) * np.float32(1 / 6))
        else:
            scale = nearest_even(np.maximum(top, np.float32(6 * 2.0**-9)).astype(np.float64) / 6, E4M3)
        codes = nearest_even(part / scale, E4M3 if kind == "A8" else E2M1)
        out[..., first : first + block] = codes * scale
    return out


@dataclass
class Memory:
    """What layers leave for those above them, by layer."""

    rows: dict[int, Array] = field(default_factory=dict)
    keys: dict[int, Array] = field(default_factory=dict)
    topk_indices: dict[int, list[list[int]]] = field(default_factory=dict)
    candidates: list[set[int]] = field(default_factory=list)


@dataclass
class Independent:
    """`text`: the `text_config` object; `weights` by slot name in float64; `packed`: names stored as FP8 or FP4."""

    text: dict[str, Any]
    weights: dict[str, Array]
    packed: set[str]
    rounding: Rounding

    def linear(self, name: str, x: Array) -> Array:
        if name in self.packed:
            x = self.rounding.q(x, "A8")
        return self.rounding.act(x @ self.weights[name].T)

    def norm(self, name: str, x: Array) -> Array:
        size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.text["rms_norm_eps"])
        return self.rounding.act(self.weights[f"{name}.weight"] * x / size)

    def layer(
        self, index: int, h: Array, pre: Array, memory: Memory, picture: NDArray[np.bool_], engram: Array | None
    ) -> tuple[Array, Array]:
        """Streams [T, M, C] and the read weights for the next sub-layer, from those that enter."""
        name = f"layers.{index}"
        if engram is not None:
            h = self.recall(name, h, engram, picture)
        pre_ffn, post, comb = self.mix(f"{name}.hc_attn", h)
        x = self.norm(f"{name}.attn_norm", self.rounding.act(np.einsum("tm,tmc->tc", pre, h)))
        y = self.attention(index, x, memory)
        h = self.rounding.act(post[:, :, None] * y[:, None] + np.einsum("tij,tic->tjc", comb, h))
        pre_next, post, comb = self.mix(f"{name}.hc_ffn", h)
        x = self.norm(f"{name}.ffn_norm", self.rounding.act(np.einsum("tm,tmc->tc", pre_ffn, h)))
        y = self.experts(f"{name}.ffn", x, picture)
        return self.rounding.act(post[:, :, None] * y[:, None] + np.einsum("tij,tic->tjc", comb, h)), pre_next

    def mix(self, name: str, h: Array) -> tuple[Array, Array, Array]:
        streams, eps = h.shape[1], self.text["hc_eps"]
        x = h.reshape(len(h), -1)
        m = (x @ self.weights[f"{name}_fn"].T) / np.sqrt(
            (x**2).mean(axis=-1, keepdims=True) + self.text["rms_norm_eps"]
        )
        scale, base = self.weights[f"{name}_scale"], self.weights[f"{name}_base"]
        pre = sigmoid(m[:, :streams] * scale[0] + base[:streams]) + eps
        post = 2 * sigmoid(m[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams])
        comb = (m[:, 2 * streams :] * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
        comb = np.exp(comb - comb.max(axis=2, keepdims=True))
        comb = comb / comb.sum(axis=2, keepdims=True) + eps
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        for _ in range(self.text["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(axis=2, keepdims=True) + eps)
            comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        return pre, post, comb

    def recall(self, name: str, h: Array, rows: Array, picture: NDArray[np.bool_]) -> Array:
        width, streams, eps = h.shape[2], h.shape[1], self.text["rms_norm_eps"]
        both = self.linear(f"{name}.engram.wkv", rows)
        value = both[:, streams * width :]
        q, k = self.weights[f"{name}.engram.q_weight"], self.weights[f"{name}.engram.k_weight"]
        out = h.copy()
        for stream in range(streams):
            key = both[:, stream * width : (stream + 1) * width]
            mine = h[:, stream]
            dot = (mine * q[stream] * k[stream] * key).sum(axis=1)
            dot /= np.sqrt((mine**2).mean(axis=1) + eps) * np.sqrt((key**2).mean(axis=1) + eps) * np.sqrt(width)
            gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot))
            gate[picture] = 0
            out[:, stream] = self.rounding.act(mine + gate[:, None] * value)
        return out

    def rotate(self, x: Array, positions: Array, ratio: int, inverse: bool = False) -> Array:
        """Interleaved pairs of the last dims; float32 frequencies and angles, as in the release."""
        dim = self.text["qk_rope_head_dim"]
        theta = self.text["compress_rope_theta" if ratio else "rope_theta"]
        frequency = np.float32(theta) ** -(np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        if ratio:
            yarn = self.text["rope_scaling"]

            def turning(turns: float) -> float:
                return (
                    dim * np.log(yarn["original_max_position_embeddings"] / (turns * 2 * np.pi)) / (2 * np.log(theta))
                )

            low = max(np.floor(turning(yarn["beta_fast"])), 0)
            high = min(np.ceil(turning(yarn["beta_slow"])), dim - 1)
            ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1).astype(np.float32)
            frequency = frequency / np.float32(yarn["factor"]) * ramp + frequency * (1 - ramp)
        angle = (positions.astype(np.float32)[:, None] * frequency.astype(np.float32)).astype(np.float64)
        angle = angle.reshape(len(x), *(1,) * (x.ndim - 2), dim // 2)
        cos, sin = np.cos(angle), np.sin(angle) * (-1 if inverse else 1)
        out = x.copy()
        a, b = x[..., -dim::2], x[..., -dim + 1 :: 2]
        out[..., -dim::2], out[..., -dim + 1 :: 2] = a * cos - b * sin, a * sin + b * cos
        return self.rounding.act(out)

    def attention(self, index: int, x: Array, memory: Memory) -> Array:
        text, name = self.text, f"layers.{index}.attn"
        ratio, heads, dim = text["compress_ratios"][index], text["num_attention_heads"], text["head_dim"]
        positions = np.arange(len(x))
        low = self.norm(f"{name}.q_norm", self.linear(f"{name}.wq_a", x))
        q = self.rotate(self.linear(f"{name}.wq_b", low).reshape(-1, heads, dim), positions, ratio)
        window = self.rotate(self.norm(f"{name}.kv_norm", self.linear(f"{name}.wkv", x)), positions, ratio)
        window = self.rounding.q(window, "A8")
        if index in text["kv_source_layer_ids"]:
            self.compress(index, x, memory)
        source = max((s for s in text["kv_source_layer_ids"] if s <= index), default=None) if ratio else None
        if index in text["index_source_layer_ids"]:
            assert source is not None
            self.choose(index, low, x, memory.keys[source], memory)
        chooser = max((s for s in text["index_source_layer_ids"] if s <= index), default=None) if ratio else None
        out = np.empty_like(q)
        for t in positions:
            keys = window[max(0, t - text["sliding_window"] + 1) : t + 1]
            if source is not None and chooser is not None:
                keys = np.concatenate([keys, memory.rows[source][memory.topk_indices[chooser][t]]])
            score = q[t] @ keys.T * dim**-0.5
            top = score.max(axis=1, keepdims=True)
            p = np.exp(score - top)
            sink = np.exp(self.weights[f"{name}.attn_sink"][:, None] - top)
            out[t] = self.rounding.act(self.rounding.act(p) @ keys / (p.sum(axis=1, keepdims=True) + sink))
        out = self.rotate(out, positions, ratio, inverse=True)
        groups = text["o_groups"]
        wo_a = self.weights[f"{name}.wo_a"].reshape(groups, text["o_lora_rank"], -1)
        low_out = self.rounding.act(np.einsum("tgi,goi->tgo", out.reshape(len(x), groups, -1), wo_a))
        return self.linear(f"{name}.wo_b", low_out.reshape(len(x), -1))

    def compress(self, index: int, x: Array, memory: Memory) -> None:
        """Latents of whole groups; index keys from them before rotation."""
        name, ratio = f"layers.{index}.attn", self.text["compress_ratios"][index]
        count = len(x) // ratio
        kv = x @ self.weights[f"{name}.compressor.wkv"].T
        if ratio == 1:
            pooled = self.rounding.act(kv)
        else:
            gate = (x @ self.weights[f"{name}.compressor.wgate"].T)[: count * ratio].reshape(count, ratio, -1)
            weight = np.exp(gate - gate.max(axis=1, keepdims=True))
            weight /= weight.sum(axis=1, keepdims=True)
            pooled = self.rounding.act((weight * kv[: count * ratio].reshape(count, ratio, -1)).sum(axis=1))
        latent = self.norm(f"{name}.compressor.norm", pooled)
        first = np.arange(count) * ratio
        key = self.norm(f"{name}.indexer.k_norm", self.linear(f"{name}.indexer.wk", latent))
        memory.keys[index] = self.rounding.q(self.rotate(key, first, ratio), "F4U")
        memory.rows[index] = self.rounding.q(self.rotate(latent, first, ratio), "F4E")

    def choose(self, index: int, low: Array, x: Array, keys: Array, memory: Memory) -> None:
        """Two-level selection, query by query (spec v41 3.3)."""
        text, name = self.text, f"layers.{index}.attn.indexer"
        heads, dim, ratio = text["index_n_heads"], text["index_head_dim"], text["compress_ratios"][index]
        q = self.linear(f"{name}.wq_b", low).reshape(-1, heads, dim)
        q = self.rounding.q(self.rotate(q, np.arange(len(x)), ratio), "F4U")
        w = self.rounding.act(self.linear(f"{name}.weights_proj", x) * (dim**-0.5 * heads**-0.5))
        source = text["candidate_source_layer_id"]
        memory.topk_indices[index] = []
        for t in range(len(x)):
            reach = (t + 1) // ratio
            dots = self.rounding.act(np.einsum("nd,pd->np", q[t], keys[:reach]))
            score = self.rounding.act(self.rounding.act(np.maximum(dots, 0) * w[t][:, None]).sum(axis=0))
            if index == source:
                memory.candidates.append(self.candidates(score, reach))
            allowed = range(reach)
            if source is not None and index > source:
                allowed = [p for p in allowed if p in memory.candidates[t]]
            ranked = sorted(allowed, key=lambda p: (-score[p], p))
            memory.topk_indices[index].append(sorted(ranked[: text["index_topk"]]))

    def candidates(self, score: Array, reach: int) -> set[int]:
        size = self.text["candidate_block_size"]
        blocks = range(-(-reach // size))
        best = {b: np.inf if b == (reach - 1) // size else score[b * size : (b + 1) * size].max() for b in blocks}
        kept = sorted(blocks, key=lambda b: (-best[b], b))[: self.text["candidate_topk_blocks"]]
        return {p for b in kept for p in range(b * size, min((b + 1) * size, reach))}

    def experts(self, name: str, x: Array, picture: NDArray[np.bool_]) -> Array:
        text = self.text
        affinity = np.sqrt(np.logaddexp(0, x @ self.weights[f"{name}.gate"].T))
        bias = np.where(
            picture[:, None], self.weights.get(f"{name}.gate.bias_vl", 0.0), self.weights[f"{name}.gate.bias"]
        )
        out = np.zeros_like(x)
        for t in range(len(x)):
            chosen = np.argsort(-(affinity + bias)[t], kind="stable")[: text["num_experts_per_tok"]]
            weight = affinity[t, chosen] / (affinity[t, chosen].sum() + 1e-20) * text["routed_scaling_factor"]
            for expert, w in sorted(zip(chosen.tolist(), weight.tolist(), strict=True)):
                out[t] += self.expert(f"{name}.experts.{expert}", x[t], w)
            out[t] += self.expert(f"{name}.shared_experts", x[t], 1.0)
        return self.rounding.act(out)

    def expert(self, name: str, x: Array, weight: float) -> Array:
        limit = self.text["swiglu_limit"]
        gate = np.minimum(self.linear(f"{name}.w1", x), limit)
        up = np.clip(self.linear(f"{name}.w3", x), -limit, limit)
        return self.linear(f"{name}.w2", self.rounding.act(gate * sigmoid(gate) * up * weight))

    def logits(self, h: Array, pre: Array) -> Array:
        return self.norm("norm", self.rounding.act(np.einsum("tm,tmc->tc", pre, h))) @ self.weights["head"].T


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
