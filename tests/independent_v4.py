"""A second V4 backbone, written from the specification alone: numpy, one token at a time, sums in float64.

It shares no code with the package. One sequence, whole prefill. `bf16` rounds where the released code holds bf16
tensors (spec v4 3.6); `rounded` applies its FP8 and FP4 roundings and the Hadamard rotation. Neither: exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def to_bf16(x: Array) -> Array:
    """Nearest-even values with 8 significant bits."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def to_e4m3(x: Array) -> Array:
    """Nearest-even e4m3 values; x lies within +-448."""
    _, exponent = np.frexp(np.asarray(x, np.float64))
    step = np.ldexp(1.0, np.maximum(exponent - 1, -6) - 3)
    return np.rint(x / step) * step


def to_e2m1(x: Array) -> Array:
    """Nearest e2m1 values, halves to the even code; x lies within +-6."""
    distance = np.abs(np.abs(x)[..., None] - E2M1)
    nearest = distance.min(axis=-1, keepdims=True)
    even_first = np.where(distance == nearest, np.arange(8) % 2, 2)
    return np.copysign(E2M1[even_first.argmin(axis=-1)], x)


def power_of_two_above(x: np.float32) -> float:
    """2^ceil(log2 x)."""
    mantissa, exponent = np.frexp(x)
    return float(np.ldexp(1.0, int(exponent) - (1 if mantissa == 0.5 else 0)))


def quantised(x: Array, block: int, kind: str) -> Array:
    """Quantise and dequantise along the last axis, block by block (spec 2.5)."""
    top, floor = (448.0, np.float32(1e-4)) if kind == "e4m3" else (6.0, np.float32(6 * 2.0**-126))
    out = np.empty_like(x)
    for row in np.ndindex(x.shape[:-1]):
        for first in range(0, x.shape[-1], block):
            part = x[row][first : first + block]
            amax = max(np.float32(np.abs(part).max()), floor)
            scale = power_of_two_above(np.float32(amax * np.float32(1 / top)))
            code = np.clip(part / scale, -top, top)
            out[row][first : first + block] = (to_e4m3(code) if kind == "e4m3" else to_e2m1(code)) * scale
    return out


def hadamard(x: Array) -> Array:
    size = x.shape[-1]
    sign = np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    return x @ sign * size**-0.5


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@dataclass(kw_only=True)
class Stages:
    """What an attention sub-layer stored and chose on its way."""

    window: Array
    entries: Array
    keys: Array
    topk_indices: list[list[int]]
    heads: Array  # [T, H, D] after the inverse rotation
    out: Array


@dataclass(kw_only=True)
class IndependentV4:
    """`config` is the flat JSON object; `weights` decoded values by name (matrices without `.weight`); `packed` the
    names that are stored as FP8 or FP4."""

    config: Mapping[str, Any]
    weights: Mapping[str, Array]
    packed: frozenset[str] = field(default_factory=frozenset)
    bf16: bool = False
    rounded: bool = False

    def cast(self, x: Array) -> Array:
        return to_bf16(x) if self.bf16 else x

    def linear(self, x: Array, name: str, quantise: bool = True) -> Array:
        """QL of spec 2.5; never rounds the input of a matrix that is not packed."""
        if self.rounded and quantise and name in self.packed:
            x = self.cast(quantised(x, 128, "e4m3"))
        return self.cast(x @ self.weights[name].T)

    def norm(self, x: Array, name: str) -> Array:
        eps = self.config["rms_norm_eps"]
        return self.cast(self.weights[f"{name}.weight"] * (x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)))

    # --- rotary (4.3) ---

    def frequencies(self, ratio: int) -> NDArray[np.float32]:
        dim = self.config["qk_rope_head_dim"]
        theta = self.config["compress_rope_theta" if ratio else "rope_theta"]
        f = np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])
        if not ratio:
            return f.astype(np.float32)
        scaling = self.config["rope_scaling"]
        length = scaling["original_max_position_embeddings"]

        def c(beta: float) -> float:
            return float(dim * np.log(length / (2 * np.pi * beta)) / (2 * np.log(theta)))

        low = max(int(np.floor(c(scaling["beta_fast"]))), 0)
        high: float = min(int(np.ceil(c(scaling["beta_slow"]))), dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        return (f / scaling["factor"] * ramp + f * (1 - ramp)).astype(np.float32)

    def rope(self, x: Array, position: int, ratio: int, inverse: bool = False) -> Array:
        """The last rope channels of one token's [..., D], pairs (2i, 2i + 1)."""
        f = self.frequencies(ratio)
        angle = np.float32(position) * f
        cos, sin = np.cos(angle).astype(np.float64), np.sin(angle).astype(np.float64)
        if inverse:
            sin = -sin
        out = np.array(x, np.float64)
        a, b = x[..., -2 * len(f) :: 2], x[..., 1 - 2 * len(f) :: 2]
        out[..., -2 * len(f) :: 2] = self.cast(a * cos - b * sin)
        out[..., 1 - 2 * len(f) :: 2] = self.cast(a * sin + b * cos)
        return out

    def stored_row(self, x: Array) -> Array:
        """FQ8 with block 64 on the plain channels, bf16 on the rotary ones (4.2)."""
        if not self.rounded:
            return x
        plain = self.config["head_dim"] - self.config["qk_rope_head_dim"]
        return np.concatenate([self.cast(quantised(x[..., :plain], 64, "e4m3")), to_bf16(x[..., plain:])], axis=-1)

    def index_row(self, x: Array) -> Array:
        """Hadamard, then FQ4 with block 32 (5.5)."""
        if not self.rounded:
            return x
        return self.cast(quantised(self.cast(hadamard(x)), 32, "e2m1"))

    # --- hyper-connections (3) ---

    def mix(self, streams: Array, name: str) -> tuple[Array, Array, Array]:
        m_streams, eps = self.config["hc_mult"], self.config["hc_eps"]
        scale, base = self.weights[f"{name}_scale"], self.weights[f"{name}_base"]
        pre, post, comb = [], [], []
        for x in streams.reshape(len(streams), -1):
            m = x @ self.weights[f"{name}_fn"].T / np.sqrt((x**2).mean() + self.config["rms_norm_eps"])
            pre.append(sigmoid(m[:m_streams] * scale[0] + base[:m_streams]) + eps)
            second = slice(m_streams, 2 * m_streams)
            post.append(2 * sigmoid(m[second] * scale[1] + base[second]))
            c = (m[2 * m_streams :] * scale[2] + base[2 * m_streams :]).reshape(m_streams, m_streams)
            c = np.exp(c - c.max(axis=1, keepdims=True))
            c = c / c.sum(axis=1, keepdims=True) + eps
            c = c / (c.sum(axis=0, keepdims=True) + eps)
            for _ in range(self.config["hc_sinkhorn_iters"] - 1):
                c = c / (c.sum(axis=1, keepdims=True) + eps)
                c = c / (c.sum(axis=0, keepdims=True) + eps)
            comb.append(c)
        return np.array(pre), np.array(post), np.array(comb)

    def collapse(self, streams: Array, pre: Array) -> Array:
        return self.cast((pre[:, :, None] * streams).sum(axis=1))

    def expand(self, z: Array, streams: Array, post: Array, comb: Array) -> Array:
        out = np.empty_like(streams)
        for target in range(streams.shape[1]):
            mixed = sum(comb[:, source, target, None] * streams[:, source] for source in range(streams.shape[1]))
            out[:, target] = self.cast(post[:, target, None] * z + mixed)
        return out

    # --- compressor (5.1) ---

    def entries(self, x: Array, name: str, ratio: int, dim: int) -> Array:
        """Un-rotated, normed entries that exist after all of x."""
        kv = x @ self.weights[f"{name}.wkv"].T
        gate = x @ self.weights[f"{name}.wgate"].T
        gate = gate + self.weights[f"{name}.ape"][np.arange(len(x)) % ratio]
        out = []
        for w in range(len(x) // ratio):
            own = range(ratio * w, ratio * (w + 1))
            if ratio == 4:
                before = range(4 * (w - 1), 4 * w) if w else range(0)
                values = np.array([*(kv[t, :dim] for t in before), *(kv[t, dim:] for t in own)])
                logits = np.array([*(gate[t, :dim] for t in before), *(gate[t, dim:] for t in own)])
            else:
                values, logits = kv[own], gate[own]
            alpha = np.exp(logits - logits.max(axis=0))
            out.append((alpha / alpha.sum(axis=0) * values).sum(axis=0))
        return self.norm(self.cast(np.array(out).reshape(-1, dim)), f"{name}.norm")

    def turned_entries(self, x: Array, name: str, ratio: int, dim: int) -> Array:
        """The same, rotated at the first position of each group."""
        latent = self.entries(x, name, ratio, dim)
        return np.array([self.rope(e, w * ratio, ratio) for w, e in enumerate(latent)]).reshape(-1, dim)

    # --- attention (4, 5, 6) ---

    def visible(self, t: int, length: int, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Raw keys: the causal window, and the whole span of t if it has one (6.1, set form)."""
        window = self.config["sliding_window"]
        mine = [span for span in spans if span[0] <= t <= span[1]]
        return [j for j in range(length) if 0 <= t - j <= window - 1 or any(first <= j <= last for first, last in mine)]

    def attention(self, layer: int, x: Array, spans: Sequence[tuple[int, int]] = ()) -> Stages:
        """x is the normed input [T, C]."""
        cfg, name = self.config, f"layers.{layer}.attn"
        ratio, heads, dim = cfg["compress_ratios"][layer], cfg["num_attention_heads"], cfg["head_dim"]
        u = self.norm(self.linear(x, f"{name}.wq_a"), f"{name}.q_norm")
        q = self.head_norm(self.linear(u, f"{name}.wq_b").reshape(len(x), heads, dim))
        q = np.array([self.rope(q[t], t, ratio) for t in range(len(x))])
        kv = self.norm(self.linear(x, f"{name}.wkv"), f"{name}.kv_norm")
        window = self.stored_row(np.array([self.rope(kv[t], t, ratio) for t in range(len(x))]))
        entries, keys = np.zeros((0, dim)), np.zeros((0, cfg["index_head_dim"]))
        if ratio:
            entries = self.stored_row(self.turned_entries(x, f"{name}.compressor", ratio, dim))
        if ratio == 4:
            keys = self.index_row(self.turned_entries(x, f"{name}.indexer.compressor", 4, keys.shape[1]))
        topk_indices = [list(range((t + 1) // ratio if ratio else 0)) for t in range(len(x))]
        if ratio == 4:
            topk_indices = [self.pick(layer, t, x, u, keys) for t in range(len(x))]
        out = []
        for t in range(len(x)):
            rows = np.concatenate([window[self.visible(t, len(x), spans)], entries[topk_indices[t]]])
            out.append(self.rope(self.attend(q[t], rows, self.weights[f"{name}.attn_sink"]), t, ratio, inverse=True))
        o = np.array(out)
        groups, rank = cfg["o_groups"], cfg["o_lora_rank"]
        wide = o.reshape(len(x), groups, -1)
        wo_a = self.weights[f"{name}.wo_a"].reshape(groups, rank, -1)
        y = self.cast(np.stack([wide[:, g] @ wo_a[g].T for g in range(groups)], axis=1)).reshape(len(x), -1)
        return Stages(
            window=window,
            entries=entries,
            keys=keys,
            topk_indices=topk_indices,
            heads=o,
            out=self.linear(y, f"{name}.wo_b"),
        )

    def head_norm(self, q: Array) -> Array:
        """Weightless norm per head, every operation a bf16 tensor in the released code (4.1)."""
        mean = self.cast(self.cast(q * q).mean(axis=-1, keepdims=True))
        return self.cast(q * self.cast(1 / np.sqrt(self.cast(mean + self.config["rms_norm_eps"]))))

    def attend(self, q: Array, rows: Array, sink: Array) -> Array:
        """One query's heads over its rows (4.5)."""
        logits = q @ rows.T * self.config["head_dim"] ** -0.5
        top = logits.max(axis=-1, keepdims=True)
        p = np.exp(logits - top)
        total = p.sum(axis=-1, keepdims=True) + np.exp(sink[:, None] - top)
        return self.cast(self.cast(p) @ rows / total)

    def scores(self, layer: int, t: int, x: Array, u: Array, keys: Array) -> Array:
        """Index scores of one query over all keys (5.5)."""
        cfg, name = self.config, f"layers.{layer}.attn.indexer"
        heads, dim = cfg["index_n_heads"], cfg["index_head_dim"]
        q = self.linear(u[t : t + 1], f"{name}.wq_b").reshape(heads, dim)
        q = self.index_row(self.rope(q, t, 4))
        omega = self.index_weights(layer, x[t])
        if not self.rounded:
            return np.maximum(q @ keys.T, 0).T @ omega
        dots = np.maximum(self.cast(q @ keys.T), 0)
        return self.cast(self.cast(dots * omega[:, None]).sum(axis=0))

    def index_weights(self, layer: int, x: Array) -> Array:
        """ω of 5.5, rounded twice: the projection, then its product with the factor."""
        factor = self.config["index_head_dim"] ** -0.5 * self.config["index_n_heads"] ** -0.5
        return self.cast(self.linear(x, f"layers.{layer}.attn.indexer.weights_proj", quantise=False) * factor)

    def pick(self, layer: int, t: int, x: Array, u: Array, keys: Array) -> list[int]:
        """Best visible entries, ascending; ties to the lowest."""
        count, k = (t + 1) // 4, self.config["index_topk"]
        if count <= k:
            return list(range(count))
        scores = self.scores(layer, t, x, u, keys)[:count]
        return sorted(sorted(range(count), key=lambda w: (-scores[w], w))[:k])

    # --- experts (7) ---

    def route(self, layer: int, x: Array, token: int, kind: int) -> tuple[list[int], Array]:
        """Experts and weights of one row."""
        cfg, name = self.config, f"layers.{layer}.ffn.gate"
        s = np.sqrt(np.logaddexp(0, x @ self.weights[name].T))
        if kind >= 0:
            chosen = np.argsort(-(s + self.weights[f"{name}.bias_vl"]), kind="stable")[: cfg["num_experts_per_tok"]]
        elif layer < cfg["num_hash_layers"]:
            chosen = self.weights[f"{name}.tid2eid"][token].astype(int)
        else:
            chosen = np.argsort(-(s + self.weights[f"{name}.bias"]), kind="stable")[: cfg["num_experts_per_tok"]]
        return list(chosen), s[chosen] / s[chosen].sum() * cfg["routed_scaling_factor"]

    def expert(self, x: Array, name: str, weight: float | None) -> Array:
        """Clamped SwiGLU; the routing weight comes before w2 (7.4)."""
        limit = self.config["swiglu_limit"]
        g = np.minimum(self.linear(x, f"{name}.w1"), limit)
        u = np.clip(self.linear(x, f"{name}.w3"), -limit, limit)
        a = g * sigmoid(g) * u
        return self.linear(self.cast(a if weight is None else weight * a), f"{name}.w2")

    def experts(self, layer: int, x: Array, ids: Sequence[int], kinds: Sequence[int]) -> Array:
        """x is the normed input [T, C]."""
        name, out = f"layers.{layer}.ffn", []
        for t in range(len(x)):
            chosen, weights = self.route(layer, x[t], ids[t], kinds[t])
            total = self.expert(x[t], f"{name}.shared_experts", None)
            for expert, weight in zip(chosen, weights, strict=True):
                total = total + self.expert(x[t], f"{name}.experts.{expert}", float(weight))
            out.append(self.cast(total))
        return np.array(out)

    # --- all of it (10) ---

    def layer(
        self, layer: int, streams: Array, ids: Sequence[int], kinds: Sequence[int], spans: Sequence[tuple[int, int]]
    ) -> Array:
        name = f"layers.{layer}"
        pre, post, comb = self.mix(streams, f"{name}.hc_attn")
        x = self.norm(self.collapse(streams, pre), f"{name}.attn_norm")
        streams = self.expand(self.attention(layer, x, spans).out, streams, post, comb)
        pre, post, comb = self.mix(streams, f"{name}.hc_ffn")
        x = self.norm(self.collapse(streams, pre), f"{name}.ffn_norm")
        return self.expand(self.experts(layer, x, ids, kinds), streams, post, comb)

    def logits(
        self, rows: Array, ids: Sequence[int], kinds: Sequence[int], spans: Sequence[tuple[int, int]] = ()
    ) -> Array:
        """From merged embeddings [T, C] to logits [T, V]."""
        streams = np.repeat(rows[:, None], self.config["hc_mult"], axis=1)
        for layer in range(self.config["num_hidden_layers"]):
            streams = self.layer(layer, streams, ids, kinds, spans)
        return self.norm(self.last_collapse(streams), "norm") @ self.weights["head"].T

    def last_collapse(self, streams: Array) -> Array:
        """Streams to one row, before the final norm (3.3)."""
        flat = streams.reshape(len(streams), -1)
        m = flat @ self.weights["hc_head_fn"].T
        m = m / np.sqrt((flat**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        p = sigmoid(m * self.weights["hc_head_scale"] + self.weights["hc_head_base"]) + self.config["hc_eps"]
        return self.collapse(streams, p)
