"""Differentiable ops for whole-model training on steps laid out in bins (`bins`).

Same results as the reference ops; what differs is the shape of the work: attention is a dense product over a bin with a
mask, all experts are one wide layer whose unchosen parts are multiplied by 0, gathers have cheap gradients, and nothing
asks the host. Rounding is straight-through: the value is rounded, the gradient passes. Weights are those of
`train.masters`: of a packed format, their values already decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scripts.tiny.bins import Masks
from spyglass.ops.declare import Ops
from spyglass.ops.fake_quant import reference as fake_quant_reference
from spyglass.ops.fake_quant.training import straight_through
from spyglass.ops.hyper_mix.reference import coefficients
from spyglass.ops.linear_block.training import multiply
from spyglass.ops.rope_partial.reference import rope_partial
from spyglass.ops.row_finish.reference import row_finish
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.ops.table import bind_ops
from spyglass.ops.vit_attention import varlen
from spyglass.quant.formats import FakeQuant
from spyglass.quant.packed import Packed
from spyglass.train.balance import CountingRouter, ExpertLoads

_LIKE_TRAINING = ("linear_block", "experts_grouped")  # what they can is what those of `spyglass finetune` can


@dataclass(slots=True)
class StepState(ExpertLoads):
    """What the ops of one step share: its masks, set before the forward pass, and how often experts were chosen."""

    masks: Masks | None = None

    def begin(self, masks: Masks, real_T: torch.Tensor) -> None:
        """Start a step."""
        self.masks, self.real_T, self.loads = masks, real_T, []


def training_ops(device_type: str, dtype: str, state: StepState, *, compiled: bool) -> Ops:
    """The op table of a model that learns. `compiled`: small ops are fused by torch.compile (minutes, once)."""

    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if compiled else function

    reference = bind_ops(device_type, dtype, "reference")
    round_to = StraightThrough(fused(fake_quant_reference.fake_quant))
    linear = Linears(round_to, fused(_gated))
    small = ("rms_norm", "rope_partial", "rope_half", "silu_mul", "hyper_collapse", "hyper_expand")
    changed: dict[str, Any] = {name: fused(getattr(reference, name)) for name in small}
    changed |= {
        "linear_block": linear.linear_block,
        "linear_grouped": linear_grouped,
        "experts_grouped": linear.experts_grouped,
        "router_topk": CountingRouter(state),
        "sparse_attention": Attention(state, fused(_attend)),
        "compress_pool": fused(compress_pool),
        "hyper_mix": HyperMix(fused(coefficients)),
        "fake_quant": round_to,
        "cache_write": cache_write,
    }
    joined = Joined(reference.replaced(**changed))
    changed |= {
        "hyper_read": joined.hyper_read,
        "hyper_write_read": joined.hyper_write_read,
        "row_finish": joined.row_finish,
    }
    if device_type == "cuda":
        changed["vit_attention"] = varlen.vit_attention
    return reference.replaced(dict(reference.chosen) | dict.fromkeys(_LIKE_TRAINING, "training"), **changed)


@dataclass(frozen=True, slots=True)
class StraightThrough:
    """`fake_quant`, whose gradient is that of the identity."""

    quantise: Callable[..., torch.Tensor]

    def __call__(
        self, x_ND: torch.Tensor, spec: FakeQuant, *, dims: int | None = None, tail_bf16: bool = False
    ) -> torch.Tensor:
        return straight_through(x_ND, lambda x: self.quantise(x, spec, dims=dims, tail_bf16=tail_bf16))


@dataclass(frozen=True, slots=True)
class Joined:
    """Ops that are several of `ops`, one after the other; signatures as in their references."""

    ops: Ops

    def hyper_read(
        self,
        streams_TMC: torch.Tensor,
        fn_JE: torch.Tensor,
        scale_3: torch.Tensor,
        base_J: torch.Tensor,
        weight_C: torch.Tensor,
        *,
        pre_TM: torch.Tensor | None = None,
        eps: float,
        quant: FakeQuant | None = None,
        **mix: Any,
    ) -> tuple[torch.Tensor, ...]:
        pre, post, comb = self.ops.hyper_mix(streams_TMC, fn_JE, scale_3, base_J, **mix)
        x_TC = self.ops.hyper_collapse(streams_TMC, pre if pre_TM is None else pre_TM)
        x_TC = self.ops.rms_norm(x_TC, weight_C, eps=eps)
        return x_TC, pre, post, comb, *(() if quant is None else (self.ops.fake_quant(x_TC, quant),))

    def hyper_write_read(
        self,
        z_TC: torch.Tensor,
        shared_TC: torch.Tensor | None,
        streams_TMC: torch.Tensor,
        post_TM: torch.Tensor,
        comb_TMM: torch.Tensor,
        *weights: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        z = z_TC if shared_TC is None else self.ops.add_shared(z_TC, shared_TC)
        streams = self.ops.hyper_expand(z, streams_TMC, post_TM, comb_TMM)
        return streams, *self.hyper_read(streams, *weights, **options)

    def row_finish(
        self,
        x_THD: torch.Tensor,
        cos_TR: torch.Tensor,
        sin_TR: torch.Tensor,
        *,
        weight_D: torch.Tensor | None = None,
        eps: float | None = None,
        stepwise: bool = False,
        hadamard: bool = False,
        quant: FakeQuant | None = None,
        dims: int | None = None,
        tail_bf16: bool = False,
        pages_NBD: torch.Tensor | None = None,
        write_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x_THD if eps is None else self.ops.rms_norm(x_THD, weight_D, eps=eps, stepwise=stepwise)
        x = self.ops.rope_partial(x, cos_TR, sin_TR)
        x = self.ops.hadamard(x) if hadamard else x
        x = x if quant is None else self.ops.fake_quant(x, quant, dims=dims, tail_bf16=tail_bf16)
        if pages_NBD is not None:
            self.ops.cache_write(pages_NBD, x, write_T)
        return x


def _values(weight: Packed) -> torch.Tensor:
    assert weight.scale is None, "training ops take decoded weights"
    return weight.data


@dataclass(frozen=True, slots=True)
class Linears:
    """`linear_block` and `experts_grouped`: products in the activation dtype, which a bf16 weight fits exactly."""

    round_to: StraightThrough
    gated: Callable[..., torch.Tensor]

    def linear_block(
        self,
        x_TI: torch.Tensor,
        weight: Packed,
        *,
        rounding: FakeQuant | None = None,
        addend_TO: torch.Tensor | None = None,
        bias_O: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        assert addend_TO is None, "the whole model is trained, not an adapter"
        x = x_TI if rounding is None else self.round_to(x_TI, rounding)
        if out_dtype not in (None, x_TI.dtype):
            assert bias_O is None
            return fp32_product(x, _values(weight))
        bias = None if bias_O is None else bias_O.to(x.dtype)
        return torch.nn.functional.linear(x, _values(weight).to(x.dtype), bias)

    def experts_grouped(
        self,
        x_TC: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        w1: Packed,
        w3: Packed,
        w2: Packed,
        *,
        limit: float,
        rounding: FakeQuant | None = None,
    ) -> torch.Tensor:
        experts, width, _ = w1.shape
        x = x_TC if rounding is None else self.round_to(x_TC, rounding)
        gate, up = (torch.nn.functional.linear(x, _values(w).to(x.dtype).flatten(0, 1)) for w in (w1, w3))
        weight_TE = weights_TK.new_zeros(len(x_TC), experts).scatter_add(1, ids_TK.long(), weights_TK)
        z_TEF = self.gated(gate.unflatten(1, (experts, width)), up.unflatten(1, (experts, width)), weight_TE, limit)
        z_TEF = z_TEF if rounding is None else self.round_to(z_TEF, rounding)
        down_CE = _values(w2).to(x.dtype).transpose(0, 1).flatten(1)
        return torch.nn.functional.linear(z_TEF.flatten(1), down_CE).float()


class _Product(torch.autograd.Function):
    """x Wᵀ in fp32. Its gradients are products in x's dtype, summed in fp32: small fp32 products are slow on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return x_TI.float() @ weight_OI.float().mT

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_TI, weight_OI = ctx.saved_tensors
        grad_TO = gradients[0].to(x_TI.dtype)
        return grad_TO @ weight_OI.to(x_TI.dtype), multiply(grad_TO.mT, x_TI).to(weight_OI.dtype)


def fp32_product(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """[T, in] and [out, in] to fp32 [T, out]."""
    out: torch.Tensor = _Product.apply(x_TI, weight_OI)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class HyperMix:
    """`hyper_mix` with its product apart from the rest."""

    coefficients: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def __call__(
        self,
        streams_TMC: torch.Tensor,
        fn_JE: torch.Tensor,
        scale_3: torch.Tensor,
        base_J: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        product_TJ = fp32_product(streams_TMC.flatten(1), fn_JE)
        return self.coefficients(product_TJ, streams_TMC, scale_3, base_J, **options)


def _gated(gate: torch.Tensor, up: torch.Tensor, weight_TE: torch.Tensor, limit: float) -> torch.Tensor:
    """w_e · silu(min(g, limit)) · clamp(u, ±limit), rounded once."""
    z = torch.nn.functional.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return (z * weight_TE[:, :, None]).to(gate.dtype)


def linear_grouped(x_TGI: torch.Tensor, weight: Packed, *, addend_TGO: torch.Tensor | None = None) -> torch.Tensor:
    """See the reference."""
    assert addend_TGO is None, "the whole model is trained, not an adapter"
    weight_GIO = _values(weight).to(x_TGI.dtype).unflatten(0, (x_TGI.shape[1], -1)).mT
    return torch.bmm(x_TGI.transpose(0, 1), weight_GIO).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Attention:
    """`sparse_attention` over bins; every visible entry is attended."""

    state: StepState
    attend: Callable[..., torch.Tensor]

    def __call__(
        self,
        q_THD: torch.Tensor,
        window_NBD: torch.Tensor,
        table_SP: torch.Tensor,
        seq_T: torch.Tensor,
        lo_T: torch.Tensor,
        hi_T: torch.Tensor,
        sink_H: torch.Tensor,
        *,
        scale: float,
        pool_NBD: torch.Tensor | None = None,
        topk_indices_TX: torch.Tensor | None = None,
        turn: Turn | None = None,
        **places: Any,
    ) -> torch.Tensor:
        if turn is not None:
            q_THD = row_finish(q_THD, turn.cos_TR, turn.sin_TR, eps=turn.eps, stepwise=turn.stepwise)
        masks = self.state.masks
        assert masks is not None and topk_indices_TX is None, (
            "training attends all entries; raise index_topk or shorten bins"
        )
        bins, length, _ = masks.window_BLL.shape
        keys, mask = window_NBD.view(bins, length, -1), masks.window_BLL
        if pool_NBD is not None:
            entries = pool_NBD.view(bins, -1, pool_NBD.shape[-1])
            seen = next(m for m in masks.pool_BLP.values() if m.shape[2] == entries.shape[1])
            keys, mask = torch.cat([keys, entries], dim=1), torch.cat([mask, seen], dim=2)
        out_THD = self.attend(q_THD.view(bins, length, *q_THD.shape[1:]), keys, mask, sink_H, scale).flatten(0, 1)
        return out_THD if turn is None else rope_partial(out_THD, turn.cos_TR, turn.sin_TR, inverse=True)


def _attend(
    q_BLHD: torch.Tensor, keys_BKD: torch.Tensor, mask_BLK: torch.Tensor, sink_H: torch.Tensor, scale: float
) -> torch.Tensor:
    """The reference's formula for all rows of a bin at once; logits, softmax and sums in fp32."""
    keys = keys_BKD.float()
    logits = (q_BLHD.flatten(1, 2).float() @ keys.mT).unflatten(1, q_BLHD.shape[1:3]) * scale
    logits = logits.masked_fill(~mask_BLK[:, :, None], float("-inf"))
    top = logits.detach().amax(dim=-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp(logits - top)
    total = p.sum(dim=-1, keepdim=True) + torch.exp(sink_H.float()[:, None] - top)
    rounded = p + (p.to(q_BLHD.dtype).float() - p).detach()
    out = (rounded.flatten(1, 2) @ keys).unflatten(1, q_BLHD.shape[1:3])
    return (out / total).to(q_BLHD.dtype)


def compress_pool(
    rows_TE: torch.Tensor,
    state_NE: torch.Tensor | None,
    sources_PB: torch.Tensor,
    *,
    overlap: bool,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """See the reference; each column is gathered once, so that the gradient is one sum per row."""
    assert state_NE is None, "training sequences are whole: there are no rows of earlier steps"
    kv_TE, gate_TE = rows_TE.chunk(2, dim=-1)
    if not overlap:
        return _pool(_gather(kv_TE, sources_PB), _gather(gate_TE, sources_PB), sources_PB).to(out_dtype)
    half = sources_PB.shape[1] // 2
    index = sources_PB[:, :half], sources_PB[:, half:]
    kv, gate = (
        torch.cat([_gather(part, places) for part, places in zip(both.chunk(2, dim=-1), index, strict=True)], dim=1)
        for both in (kv_TE, gate_TE)
    )
    return _pool(kv, gate, sources_PB).to(out_dtype)


def _gather(rows_TD: torch.Tensor, index_PB: torch.Tensor) -> torch.Tensor:
    return rows_TD.index_select(0, index_PB.clamp(min=0).flatten()).unflatten(0, index_PB.shape)


def _pool(kv_PBD: torch.Tensor, gate_PBD: torch.Tensor, sources_PB: torch.Tensor) -> torch.Tensor:
    absent = (sources_PB < 0)[..., None]
    weight_PBD = gate_PBD.masked_fill(absent, float("-inf")).softmax(dim=1)
    return (weight_PBD * kv_PBD).sum(dim=1)


def cache_write(pages_NBD: torch.Tensor, rows_TD: torch.Tensor, write_T: torch.Tensor) -> None:
    """Every page is written, in order: that is how bins are laid out."""
    pages_NBD.flatten(0, 1).copy_(rows_TD)
