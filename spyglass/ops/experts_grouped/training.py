"""The same experts, differentiable and many at once, their matrices packed in every pass.

Rows are laid out expert by expert, each padded to the most that one of its chunk has, so that a chunk is three batched
products; its matrices are decoded for it alone, in each pass. Experts of like load share a chunk. Sums over a token's
experts have a fixed order in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from spyglass.ops.experts_grouped import batched, reference
from spyglass.ops.experts_grouped.adapters import ExpertAdapters
from spyglass.ops.fake_quant.training import fake_quant
from spyglass.ops.linear_block.training import multiply, values_for
from spyglass.quant.formats import FakeQuant, Format
from spyglass.quant.packed import Packed

_VALUES_AT_ONCE = 1 << 28  # of a decoded matrix: 512 MB in bfloat16
ROWS_AT_ONCE = 1 << 14


def experts_grouped(
    x_TC: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w1: Packed,
    w3: Packed,
    w2: Packed,
    *,
    limit: float,
    rounding: FakeQuant | None = None,
    adapter_T: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """See `reference.py`. The choice `ids_TK` has no gradient; routing weights, plain matrices and rank rows have one.

    One adapter of one rank for all rows is what trains; others are left to the reference.
    """
    pairs: dict[str, ExpertPair] | None = None
    if adapters is not None and adapter_T is not None:
        pairs = _one_pair(adapters, adapter_T)
        if pairs is None:
            return reference.experts_grouped(
                x_TC,
                ids_TK,
                weights_TK,
                w1,
                w3,
                w2,
                limit=limit,
                rounding=rounding,
                adapter_T=adapter_T,
                adapters=adapters,
            )
    layout = lay_out(ids_TK, w1.shape[0], experts_at_once(x_TC.device, w1))
    if not layout.chunks:
        return torch.zeros(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    if not any(pair.dropout for pair in (pairs or {}).values()) and batched.suits(x_TC, (w1, w3, w2), rounding):
        scales = {name: pair.scale_ER for name, pair in (pairs or {}).items()}
        frozen = batched.Frozen({"w1": w1, "w3": w3, "w2": w2}, layout, limit, rounding, scales)
        return batched.experts(x_TC, weights_TK, frozen, pairs or {})
    rows = [chunk.rows for chunk in layout.chunks]
    rounded_TC = x_TC if rounding is None else fake_quant(x_TC, rounding)
    weight_M1 = _Spread.apply(weights_TK.reshape(-1, 1), layout.choice_M, layout.place_N[:, None])  # type: ignore[no-untyped-call]
    plain = _Spread.apply(x_TC, layout.token_M, layout.place_TK).split(rows) if pairs else [None] * len(rows)  # type: ignore[no-untyped-call]
    rounded = _Spread.apply(rounded_TC, layout.token_M, layout.place_TK).split(rows)  # type: ignore[no-untyped-call]
    beside = _chunked(pairs or {}, layout)
    out = []
    for chunk, x, base, weight, low in zip(layout.chunks, plain, rounded, weight_M1.split(rows), beside, strict=True):
        gate, up = (
            _product(chunk, matrix, stack, base, x, low).to(x_TC.dtype) for matrix, stack in (("w1", w1), ("w3", w3))
        )
        z = checkpoint(_gated, gate, up, weight, limit, use_reentrant=False, preserve_rng_state=False)
        base = z if rounding is None else fake_quant(z, rounding)
        out.append(_product(chunk, "w2", w2, base, z, low).to(x_TC.dtype))
    out_TC: torch.Tensor = _Collect.apply(torch.cat(out), layout.token_M, layout.place_TK)  # type: ignore[no-untyped-call]
    return out_TC


@dataclass(frozen=True, slots=True)
class ExpertPair:
    """A low-rank pair beside one matrix of every expert: adds scale_er · (Σ_I a_erI x_I) · b_erO, fp32 all three."""

    a_ERI: torch.Tensor
    b_ERO: torch.Tensor
    scale_ER: torch.Tensor
    dropout: float = 0.0


def _one_pair(adapters: ExpertAdapters, adapter_T: torch.Tensor) -> dict[str, ExpertPair] | None:
    """The adapter as three tensors by matrix, if it is the only one, has one rank, and all rows have it."""
    each = adapters.matrices
    if len(adapters.adapter_A) > 1 or any(len(set(ranks.ranks_AE[0])) > 1 for ranks in each.values()):
        return None
    if not bool((adapter_T == adapters.adapter_A).all()):
        return None
    found: dict[str, ExpertPair] = {}
    for matrix, ranks in each.items():
        size = (len(ranks.ranks_AE[0]), -1)
        a_ERI, b_ERO = ranks.a_RI.unflatten(0, size), ranks.b_RO.unflatten(0, size)
        found[matrix] = ExpertPair(a_ERI, b_ERO, ranks.scale_R.view(size), adapters.dropout)
    return found


def experts_at_once(device: torch.device, weight: Packed) -> int:
    """One on a CPU, where padding costs and launches do not; then values are the reference's bit for bit."""
    return 1 if device.type == "cpu" else max(_VALUES_AT_ONCE // (weight.shape[1] * weight.shape[2]), 1)


def _gated(gate_MF: torch.Tensor, up_MF: torch.Tensor, weight_M1: torch.Tensor, limit: float) -> torch.Tensor:
    gate = torch.nn.functional.silu(gate_MF.float().clamp(max=limit))
    return (gate * up_MF.float().clamp(-limit, limit) * weight_M1).to(gate_MF.dtype)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Experts whose products are computed together, each with `height` rows of the layout."""

    experts_G: torch.Tensor
    height: int

    @property
    def rows(self) -> int:
        return len(self.experts_G) * self.height


@dataclass(frozen=True, slots=True)
class Layout:
    """M rows, chunk after chunk: the token (of T) and the choice (of N = T K) of each, T and N where it is padding.

    `place_N` is the row of each choice; `place_TK` the same with a token's choices in ascending order of experts. Both
    are M where nothing was chosen.
    """

    chunks: list[Chunk]
    token_M: torch.Tensor
    choice_M: torch.Tensor
    place_N: torch.Tensor
    place_TK: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.token_M)

    def placed(self) -> Iterator[tuple[Chunk, int]]:
        """Each chunk with its first row."""
        first = 0
        for chunk in self.chunks:
            yield chunk, first
            first += chunk.rows


def lay_out(ids_TK: torch.Tensor, num_experts: int, at_once: int) -> Layout:
    """Rows of the chosen experts, at most `at_once` of them in a chunk; one read from the device."""
    device, id_N = ids_TK.device, ids_TK.flatten().long()
    load_X = torch.bincount(id_N + 1, minlength=num_experts + 1)  # nobody's first
    loads = load_X.tolist()
    experts = [expert for expert in range(num_experts) if loads[expert + 1]]
    if at_once > 1:
        experts.sort(key=lambda expert: -loads[expert + 1])
    chunks, first_E, rows = list[Chunk](), [0] * num_experts, 0
    while experts:
        height = loads[experts[0] + 1]
        now, experts = _cut(experts, min(at_once, max(ROWS_AT_ONCE // height, 1)))
        for number, expert in enumerate(now):
            first_E[expert] = rows + number * height
        chunks.append(Chunk(torch.tensor(now, device=device), height))
        rows += chunks[-1].rows
    order_N = id_N.argsort(stable=True)[loads[0] :]
    sorted_N = id_N[order_N]
    before_X = load_X.cumsum(0) - load_X
    within_N = torch.arange(loads[0], len(id_N), device=device) - before_X[sorted_N + 1]
    row_N = torch.tensor(first_E, device=device)[sorted_N] + within_N
    choice_M = torch.full((rows,), len(id_N), device=device).index_copy(0, row_N, order_N)
    place_N = torch.full_like(id_N, rows).index_copy(0, order_N, row_N)
    return Layout(
        chunks=chunks,
        token_M=choice_M // ids_TK.shape[1],
        choice_M=choice_M,
        place_N=place_N,
        place_TK=place_N.view(ids_TK.shape).gather(1, ids_TK.argsort(dim=1, stable=True)),
    )


def _cut(items: list[int], count: int) -> tuple[list[int], list[int]]:
    return items[:count], items[count:]


class _Spread(torch.autograd.Function):
    """x_m = x[source_m], 0 where source_m is no row; the gradient of a row sums over its places, in their order."""

    @staticmethod
    def forward(ctx: Any, x_NC: torch.Tensor, source_M: torch.Tensor, place_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place_NK)
        ctx.dtype = x_NC.dtype
        return _rows(x_NC, source_M)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _sums(grads[0], *ctx.saved_tensors).to(ctx.dtype), None, None


class _Collect(torch.autograd.Function):
    """out_t = Σ_k y[place_tk] in fp32, in the order of k: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, y_MC: torch.Tensor, source_M: torch.Tensor, place_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source_M)
        ctx.dtype = y_MC.dtype
        return _sums(y_MC, place_NK)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rows(grads[0].to(ctx.dtype), *ctx.saved_tensors), None, None


def _rows(x_NC: torch.Tensor, source_M: torch.Tensor) -> torch.Tensor:
    return torch.cat([x_NC, x_NC.new_zeros(1, x_NC.shape[1])]).index_select(0, source_M)


def _sums(y_MC: torch.Tensor, place_NK: torch.Tensor) -> torch.Tensor:
    out_NC = torch.zeros(len(place_NK), y_MC.shape[1], dtype=torch.float32, device=y_MC.device)
    for place_N in place_NK.unbind(1):
        chosen = y_MC.index_select(0, place_N.clamp(max=len(y_MC) - 1)).float()
        out_NC += chosen.masked_fill_((place_N == len(y_MC))[:, None], 0.0)
    return out_NC


def _chunked(pairs: Mapping[str, ExpertPair], layout: Layout) -> list[dict[str, ExpertPair]]:
    """The pairs of each chunk's experts; cut in one piece, so that their gradients are joined once."""
    order_E = torch.cat([chunk.experts_G for chunk in layout.chunks])
    sizes = [len(chunk.experts_G) for chunk in layout.chunks]
    out: list[dict[str, ExpertPair]] = [{} for _ in sizes]
    for matrix, pair in pairs.items():
        tensors = (pair.a_ERI, pair.b_ERO, pair.scale_ER)
        parts = (tensor.index_select(0, order_E).split(sizes) for tensor in tensors)
        for found, (a_GRI, b_GRO, scale_GR) in zip(out, zip(*parts, strict=True), strict=True):
            found[matrix] = ExpertPair(a_GRI, b_GRO, scale_GR, pair.dropout)
    return out


def _product(
    chunk: Chunk,
    matrix: str,
    stack: Packed,
    base_MI: torch.Tensor,
    x_MI: torch.Tensor | None,
    pairs: Mapping[str, ExpertPair],
) -> torch.Tensor:
    """Rows of a chunk times their experts' matrices, fp32 [M, O], with what the pair of the matrix adds."""
    shape = (len(chunk.experts_G), chunk.height, -1)
    out: torch.Tensor = _Product.apply(base_MI.view(shape), stack.data, stack.scale, stack.format, chunk.experts_G)  # type: ignore[no-untyped-call]
    if matrix in pairs:
        assert x_MI is not None
        pair = pairs[matrix]
        x_GHI = torch.nn.functional.dropout(x_MI.view(shape), pair.dropout)
        out = out + _LowRank.apply(x_GHI, pair.a_ERI, pair.b_ERO, pair.scale_ER)  # type: ignore[no-untyped-call]
    return out.flatten(0, 1)


class _Product(torch.autograd.Function):
    """x_GHI · W_GOIᵀ in fp32 for the matrices `experts_G` of a stack (see `linear_block.training.Product`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_GHI: torch.Tensor,
        data: torch.Tensor,
        scale: torch.Tensor | None,
        format: Format,
        experts_G: torch.Tensor,
    ) -> torch.Tensor:
        ctx.format, ctx.dtype = format, x_GHI.dtype
        ctx.save_for_backward(x_GHI if ctx.needs_input_grad[1] else None, data, scale, experts_G)
        return multiply(x_GHI, _values(x_GHI, data, scale, format, experts_G).mT)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x_GHI, data, scale, experts_G = ctx.saved_tensors
        grad_x = grad_data = None
        if ctx.needs_input_grad[0]:
            weight_GOI = _values(grads[0].to(ctx.dtype), data, scale, ctx.format, experts_G)
            grad_x = multiply(grads[0].to(weight_GOI.dtype), weight_GOI).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_GOI = multiply(grads[0].to(x_GHI.dtype).mT, x_GHI).to(data.dtype)
            grad_data = torch.zeros_like(data).index_copy_(0, experts_G, grad_GOI)
        return grad_x, grad_data, None, None, None


def _values(
    x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None, format: Format, experts_G: torch.Tensor
) -> torch.Tensor:
    """The matrices [G, O, I] as numbers that multiply with rows like x."""
    some = None if scale is None else scale.index_select(0, experts_G)
    return values_for(x, data.view(torch.uint8)[experts_G].view(data.dtype), some, format)


class _LowRank(torch.autograd.Function):
    """scale · (x aᵀ) b in fp32, one pair for each batch of rows; x is kept as it is, not widened."""

    @staticmethod
    def forward(
        ctx: Any, x_GHI: torch.Tensor, a_GRI: torch.Tensor, b_GRO: torch.Tensor, scale_GR: torch.Tensor
    ) -> torch.Tensor:
        u_GHR = (x_GHI.float() @ a_GRI.float().mT) * scale_GR[:, None]
        ctx.save_for_backward(x_GHI, a_GRI, b_GRO, scale_GR, u_GHR)
        return u_GHR @ b_GRO.float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, None]:
        x_GHI, a_GRI, b_GRO, scale_GR, u_GHR = ctx.saved_tensors
        du_GHR = (grads[0] @ b_GRO.float().mT) * scale_GR[:, None]
        dx_GHI = (du_GHR @ a_GRI.float()).to(x_GHI.dtype) if ctx.needs_input_grad[0] else None
        return dx_GHI, (du_GHR.mT @ x_GHI.float()).to(a_GRI.dtype), (u_GHR.mT @ grads[0]).to(b_GRO.dtype), None
