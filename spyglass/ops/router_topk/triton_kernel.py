"""The kernels behind `triton.py`; importing it needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from spyglass.ops.gpu import overlap
from spyglass.ops.hyper_mix.triton_kernel import multiply
from spyglass.ops.overlap import begin

_INNER = 64
_SINGLE, _WIDEST = 16, 1 << 13  # rows up to which they are multiplied one by one, and channels held in registers


def project(x_TC: torch.Tensor, weight_EC: torch.Tensor) -> torch.Tensor:
    """Logits x · Wᵀ in S shares of the channels, fp32 [T, S, E]; both contiguous."""
    rows, width = x_TC.shape
    experts = len(weight_EC)
    if 0 < rows <= _SINGLE and width <= _WIDEST:
        ROWS = min(4, triton.next_power_of_2(rows))
        shares = triton.cdiv(rows, ROWS)
        logits_TSE = torch.empty((shares * ROWS, 1, experts), dtype=torch.float32, device=x_TC.device)
        _project_single[(shares, triton.cdiv(experts, 2))](
            x_TC, weight_EC, logits_TSE, rows, width, experts,
            ROWS=ROWS, EXPERTS=2, WIDTH=triton.next_power_of_2(width), num_warps=8, **overlap(logits_TSE),
        )  # fmt: skip
        return logits_TSE[:rows]
    blocks = triton.cdiv(width, _INNER)
    if rows <= 128:
        ROWS, EXPERTS, steps = 16, 32, 4
    else:
        ROWS, EXPERTS, steps = 64, 64, blocks
    splits = triton.cdiv(blocks, steps)
    out_TSE = torch.empty((rows, splits, experts), dtype=torch.float32, device=x_TC.device)
    if rows:
        _project[(triton.cdiv(rows, ROWS), triton.cdiv(experts, EXPERTS), splits)](
            x_TC, weight_EC, out_TSE, rows, width, experts, splits, steps,
            ROWS=ROWS, EXPERTS=EXPERTS, INNER=_INNER, num_warps=4, **overlap(out_TSE),
        )  # fmt: skip
    return out_TSE


@triton.jit(do_not_specialize=["rows"])
def _project_single(
    x_ptr, weight_ptr, out_ptr, rows, width, experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    """All channels of some experts, multiplied and added up without tensor cores."""
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    channel = tl.arange(0, WIDTH)
    inside = channel < width
    there = (expert < experts)[:, None] & inside[None, :]
    weight = tl.load(weight_ptr + expert[:, None] * width + channel[None, :], mask=there, other=0.0).to(tl.float32)
    begin(OVERLAPS)
    for index in tl.static_range(ROWS):
        row = (tl.program_id(0) * ROWS + index).to(tl.int64)
        x = tl.load(x_ptr + row * width + channel, mask=inside & (0 * channel + row < rows), other=0.0)
        total = tl.sum(weight * x.to(tl.float32)[None, :], axis=1)
        tl.store(out_ptr + row * experts + expert, total, mask=expert < experts)


@triton.jit(do_not_specialize=["rows"])
def _project(
    x_ptr, weight_ptr, out_ptr, rows, width, experts, splits, steps,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, INNER: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    split = tl.program_id(2)
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for step in range(steps):
        channel = (split * steps + step) * INNER + tl.arange(0, INNER)
        inside = channel < width
        x_there = (row < rows)[:, None] & inside[None, :]
        x = tl.load(x_ptr + row[:, None] * width + channel[None, :], mask=x_there, other=0.0)
        weight_there = inside[:, None] & (expert < experts)[None, :]
        weight = tl.load(weight_ptr + expert[None, :] * width + channel[:, None], mask=weight_there, other=0.0)
        if weight.dtype == tl.float32:
            total = multiply(x, weight, total)
        elif x.dtype == weight.dtype:
            total = tl.dot(x, weight, total)
        else:
            total = tl.dot(x.to(tl.float32), weight.to(tl.float32), total, input_precision="ieee")
    to = out_ptr + (row[:, None] * splits + split) * experts + expert[None, :]
    tl.store(to, total, mask=(row < rows)[:, None] & (expert < experts)[None, :])


def choose(
    logits_TSE: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    scale: float,
    bias_E: torch.Tensor | None,
    bias_image_E: torch.Tensor | None,
    is_image_T: torch.Tensor | None,
    forced_TK: torch.Tensor | None,
    forced_row_T: torch.Tensor | None,
    positions_T: torch.Tensor | None,
) -> None:
    """Write ids and weights of each row."""
    rows, splits, experts = logits_TSE.shape
    k = ids_TK.shape[1]
    if rows == 0 or k == 0:
        return
    _choose[(rows,)](
        logits_TSE, ids_TK, weights_TK, logits_TSE if bias_E is None else bias_E,
        logits_TSE if bias_image_E is None else bias_image_E, logits_TSE if is_image_T is None else is_image_T,
        logits_TSE if forced_TK is None else forced_TK, logits_TSE if forced_row_T is None else forced_row_T,
        logits_TSE if positions_T is None else positions_T, experts, splits, scale,
        BIASED=bias_E is not None, IMAGES=is_image_T is not None, FORCED=forced_TK is not None,
        BY_ROW=forced_row_T is not None, PADDED=positions_T is not None, K=k, K_2=triton.next_power_of_2(k),
        SPLITS=triton.next_power_of_2(splits), EXPERTS=triton.next_power_of_2(experts),
        num_warps=1 if splits == 1 and experts <= 512 else 4, **overlap(logits_TSE),
    )  # fmt: skip


@triton.jit
def _choose(
    logits_ptr, ids_ptr, weights_ptr, bias_ptr, image_bias_ptr, image_ptr, forced_ptr, forced_row_ptr, position_ptr,
    experts, splits, scale,
    BIASED: tl.constexpr, IMAGES: tl.constexpr, FORCED: tl.constexpr, BY_ROW: tl.constexpr, PADDED: tl.constexpr,
    K: tl.constexpr, K_2: tl.constexpr, SPLITS: tl.constexpr, EXPERTS: tl.constexpr, OVERLAPS: tl.constexpr,
) -> None:  # fmt: skip
    begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    real = expert < experts
    split = tl.arange(0, SPLITS)
    at = (row * splits + split[:, None]) * experts + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=(split < splits)[:, None] & real[None, :], other=0.0)
    scores = _root_of_softplus(tl.sum(logits, axis=0))
    ranked = scores
    if BIASED:
        ranked = scores + tl.load(bias_ptr + expert, mask=real, other=0.0)
    if IMAGES:
        image = tl.load(image_ptr + row) != 0
        ranked = tl.where(image, scores + tl.load(image_bias_ptr + expert, mask=real, other=0.0), ranked)
    ranked = tl.where(real, ranked, float("-inf"))
    place = tl.arange(0, K_2)
    ids = tl.zeros([K_2], tl.int32)
    weights = tl.zeros([K_2], tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(ranked, axis=0, tie_break_left=True)
        ranked = tl.where(expert == best, float("-inf"), ranked)
        if FORCED:
            forced_row = tl.load(forced_row_ptr + row) if BY_ROW else row
            forced = tl.load(forced_ptr + forced_row * K + k).to(tl.int32)
            best = tl.where(image, best, forced) if IMAGES else forced
        best = tl.minimum(best, experts - 1)
        ids = tl.where(place == k, best, ids)
        weights = tl.where(place == k, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), weights)
    weights = weights / tl.sum(weights, axis=0) * scale
    if PADDED:
        in_step = tl.load(position_ptr + row) >= 0
        ids, weights = tl.where(in_step, ids, -1), tl.where(in_step, weights, 0.0)
    tl.store(ids_ptr + row * K + place, ids, mask=place < K)
    tl.store(weights_ptr + row * K + place, weights, mask=place < K)


@triton.jit
def _root_of_softplus(x) -> tl.tensor:
    """sqrt(ln(1 + e^x)) = sqrt(max(x, 0) + ln(1 + u)), u = e^-|x|; ln(1 + u) = 2 artanh(u / (2 + u)) as a series."""
    u = tl.exp(-tl.abs(x))
    s = u / (2 + u)
    square = s * s
    series = tl.full(x.shape, 1.0 / 15, tl.float32)
    for step in tl.static_range(7):
        series = series * square + 1.0 / (13 - 2 * step)
    return tl.sqrt(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + 2 * s * series)
