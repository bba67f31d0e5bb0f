"""From logits to token ids, for all sequences of a step at once.

A kept token is defined without sorting, so that ties never matter: with x the logits over the temperature, token i is
kept iff fewer than top_k tokens have a larger x, the tokens with a larger x have less than top_p of the mass of those
that top_k keeps, and exp(x_i - max x) >= min_p. Among kept tokens the choice is the inverse of the cumulative
distribution, in vocabulary order and double precision, at one uniform number u(seed, position): a counter, hashed. It
depends on nothing else, so an answer never depends on its neighbours, and costs one number where a race of exponentials
costs one per vocabulary entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.engine.request import SamplingParams, TokenLogprob

_BLOCK = 256  # columns summed at a time when drawing
_LOW_BITS, _HIGH_BITS = 16, 15  # of the 31 bits of a float's magnitude, for the search of a threshold
_INFINITY_BITS = 0x7F800000
_LIKELIEST = 64  # blocks whose best entries are looked at before all are
_COLDEST = 1e-30  # temperatures below draw the same tokens, and would be 0 in float32
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokens:
    """Distinct ids of one sequence's prompt and answer, and how often each stands in the answer."""

    ids_J: NDArray[np.int64]
    counts_J: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInput:
    """What the sampler must know of the S rows of one step. `used` is None for rows without penalties.

    `allowed` bool [S', V] are the next tokens of the rows `grammar_rows`, whose answers follow a grammar. `seed_S`,
    `position_S` (of the token to be drawn), below 2 ** 64, choose the random number of a row.
    """

    params: Sequence[SamplingParams]
    seed_S: Sequence[int] | NDArray[np.uint64]
    position_S: Sequence[int] | NDArray[np.uint64]
    used: Sequence[UsedTokens | None]
    grammar_rows: Sequence[int] = ()
    allowed: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Chosen ids, log-probabilities of rows that asked for them, and whether the row held numbers at all (no NaN)."""

    ids: list[int]
    logprobs: list[TokenLogprob | None]
    sound: list[bool]


def draw(logits_SV: torch.Tensor, step: SampleInput, banned: torch.Tensor) -> SampledTokens:
    """One token per row. `logits_SV` fp32 is overwritten; `banned` int64 ids are never chosen."""
    tops = [p.logprobs for p in step.params]
    lse_S = torch.logsumexp(logits_SV, dim=-1) if any(top is not None for top in tops) else None
    raw_SV = logits_SV.clone() if lse_S is not None else logits_SV
    logits_SV.index_fill_(1, banned, float("-inf"))
    if step.allowed is not None:
        restrict(logits_SV, step.grammar_rows, step.allowed)
    add_biases(logits_SV, step.params)
    penalise(logits_SV, step.params, step.used)
    ids_S = _choose(logits_SV, step).clamp(max=logits_SV.shape[1] - 1)
    sound = logits_SV.gather(1, ids_S[:, None])[:, 0].isfinite().tolist()
    if lse_S is None:
        return SampledTokens(ids=ids_S.tolist(), logprobs=[None] * len(sound), sound=sound)
    return SampledTokens(ids=ids_S.tolist(), logprobs=logprobs_of(raw_SV, lse_S, ids_S, tops), sound=sound)


def restrict(logits_SV: torch.Tensor, rows: Sequence[int], allowed: torch.Tensor) -> torch.Tensor:
    """Leave rows `rows` only the tokens that `allowed` bool [len(rows), V] names, in place."""
    row_J = torch.as_tensor(rows, device=logits_SV.device)
    logits_SV[row_J] = logits_SV[row_J].masked_fill_(~allowed.to(logits_SV.device), float("-inf"))
    return logits_SV


def add_biases(logits_SV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """l <- l + bias of each token that a row's `logit_bias` names, in place."""
    listed = [(s, token, bias) for s, p in enumerate(params) for token, bias in p.logit_bias.items()]
    if listed:
        row_J, id_J, bias_J = (torch.tensor(column, device=logits_SV.device) for column in zip(*listed, strict=True))
        logits_SV[row_J, id_J] += bias_J.float()
    return logits_SV


def penalise(
    logits_SV: torch.Tensor, params: Sequence[SamplingParams], used: Sequence[UsedTokens | None]
) -> torch.Tensor:
    """Apply repetition, then frequency and presence penalties in place; other entries are not touched.

    l <- l / r if l > 0 else l * r for ids of prompt or answer; then l <- l - f * n - p * (n > 0), n its answer count.
    """
    rows = [s for s, tokens in enumerate(used) if tokens is not None and len(tokens.ids_J)]
    if not rows:
        return logits_SV
    listed = [tokens for tokens in used if tokens is not None and len(tokens.ids_J)]
    lengths = [len(tokens.ids_J) for tokens in listed]
    device = logits_SV.device
    row_J = torch.from_numpy(np.repeat(rows, lengths)).to(device)
    id_J = torch.from_numpy(np.concatenate([tokens.ids_J for tokens in listed])).to(device)
    count_J = torch.from_numpy(np.concatenate([tokens.counts_J for tokens in listed])).to(device)
    chosen = [params[s] for s in rows]
    values = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in chosen], np.float32)
    repetition_J, frequency_J, presence_J = torch.from_numpy(np.repeat(values, lengths, axis=0)).to(device).unbind(1)
    logit_J = logits_SV[row_J, id_J]
    logit_J = torch.where(logit_J > 0, logit_J / repetition_J, logit_J * repetition_J)
    logit_J = logit_J - frequency_J * count_J - presence_J * (count_J > 0)
    logits_SV[row_J, id_J] = logit_J
    return logits_SV


def logprobs_of(
    logits_SV: torch.Tensor, lse_S: torch.Tensor, ids_S: torch.Tensor, tops: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """log softmax of each row's id and of its n top entries, None where `tops` is; `lse_S` is the rows' logsumexp."""
    most = max((min(top, logits_SV.shape[1]) for top in tops if top is not None), default=0)
    chosen = (logits_SV.gather(1, ids_S[:, None])[:, 0] - lse_S).tolist()
    value_SL, column_SL = top_entries(logits_SV, max(most, 1))
    top_ids, top_values = column_SL[:, :most].tolist(), (value_SL[:, :most] - lse_S[:, None]).tolist()
    return [
        None
        if top is None
        else TokenLogprob(
            token_id=token, logprob=value, top=tuple(zip(top_ids[s][:top], top_values[s][:top], strict=True))
        )
        for s, (token, value, top) in enumerate(zip(ids_S.tolist(), chosen, tops, strict=True))
    ]


def uniform(seed: NDArray[np.uint64], position: NDArray[np.uint64]) -> NDArray[np.float64]:
    """u in [0, 1) with 52 random bits: splitmix64's finaliser over seed, then over that plus position."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _choose(logits_SV: torch.Tensor, step: SampleInput) -> torch.Tensor:
    """Greedy rows take the maximum, the others draw."""
    random = [s for s, p in enumerate(step.params) if p.temperature > 0]
    if len(random) < len(step.params):
        ids_S = largest(logits_SV)
        if not random:
            return ids_S
        logits_SV = logits_SV[torch.as_tensor(random, device=logits_SV.device)]
    params = [step.params[s] for s in random]
    seed_S, position_S = (np.array([each[s] for s in random], np.uint64) for each in (step.seed_S, step.position_S))
    u_S = torch.from_numpy(uniform(seed_S, position_S)).to(logits_SV.device)
    drawn_S = inverse_draw(kept_weights(logits_SV, params), u_S)
    if len(random) == len(step.params):
        return drawn_S
    ids_S[torch.as_tensor(random, device=ids_S.device)] = drawn_S
    return ids_S


def largest(logits_SV: torch.Tensor) -> torch.Tensor:
    """`argmax` of each row, int64 [S]: the first of equals, a NaN before all numbers.

    torch's own reads a CPU's memory one number at a time; the maxima of blocks of columns, ten times as fast.
    """
    best_SN, rest_SV = _block_maxima(logits_SV)
    if rest_SV.shape[1]:
        best_SN = torch.cat([best_SN, rest_SV.amax(dim=-1, keepdim=True)], dim=1)
    first_S1 = best_SN.argmax(dim=-1, keepdim=True) * _BLOCK
    column_SB = first_S1 + torch.arange(_BLOCK, device=logits_SV.device)
    return first_S1[:, 0] + logits_SV.gather(1, column_SB.clamp_(max=logits_SV.shape[1] - 1)).argmax(dim=-1)


def _block_maxima(x_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of every whole block of _BLOCK columns [S, N], and the columns behind them."""
    whole = x_SV.shape[1] // _BLOCK * _BLOCK
    return x_SV[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=-1), x_SV[:, whole:]


def top_entries(x_SV: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entries of each row, falling, and their columns, [S, L]; rows with fewer than others end with -inf.

    They are all that reach the maximum of the `blocks`-th best block of columns: at least so many, usually few more.
    """
    best_SN, rest_SV = _block_maxima(x_SV)
    rows, number = best_SN.shape
    best = best_SN.topk(min(blocks, number), dim=-1)
    every_S1 = torch.arange(rows, device=x_SV.device)[:, None]
    inside_SJ = x_SV[:, : number * _BLOCK].unflatten(1, (-1, _BLOCK))[every_S1, best.indices].flatten(1)
    value_SJ = torch.cat([inside_SJ, rest_SV], dim=1)  # the last columns are less than a block
    wanted_SJ = value_SJ >= (best.values[:, -1:] if blocks < number else float("-inf"))
    row, place = wanted_SJ.nonzero(as_tuple=True)
    first_SM = torch.cat([best.indices, best.indices.new_full((rows, 1), number)], dim=1) * _BLOCK
    column = first_SM[row, place // _BLOCK] + place % _BLOCK
    count_S = wanted_SJ.sum(dim=-1)
    slot = torch.arange(len(row), device=x_SV.device) - (count_S.cumsum(0) - count_S)[row]
    value_SL = x_SV.new_full((rows, max(1, int(count_S.max()))), float("-inf"))
    column_SL = torch.zeros_like(value_SL, dtype=torch.int64)
    value_SL[row, slot], column_SL[row, slot] = value_SJ[row, place], column
    value_SL, order_SL = value_SL.sort(dim=-1, descending=True)
    return value_SL, column_SL.gather(1, order_SL)


def kept_weights(logits_SV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """exp((l - max l) / temperature) of the tokens that top_k, top_p and min_p keep, 0 elsewhere; temperatures above 0.

    `logits_SV` is overwritten. Columns are filled up with zeros to whole blocks.
    """
    vocabulary = logits_SV.shape[1]
    settings = np.array(
        [(max(p.temperature, _COLDEST), min(p.top_k, vocabulary), p.top_p, p.min_p) for p in params], np.float64
    )
    temperature_S1 = torch.from_numpy(settings[:, :1].astype(np.float32)).to(logits_SV.device)
    # subtracting first keeps tiny temperatures finite: the most likely token stays at 0
    x_SV = logits_SV.sub_(logits_SV.amax(dim=-1, keepdim=True)).div_(temperature_S1)
    weight_SV = x_SV.new_zeros(len(x_SV), -(-vocabulary // _BLOCK) * _BLOCK)
    torch.exp(x_SV, out=weight_SV[:, :vocabulary])
    least_S1 = _least_kept(x_SV, weight_SV[:, :vocabulary], settings)
    if least_S1 is not None:
        # a product with 0 or 1: a fill under a mask that nobody can foresee takes five times as long
        weight_SV[:, :vocabulary].mul_(torch.ge(x_SV, least_S1, out=torch.empty_like(x_SV)))
    return weight_SV


def inverse_draw(weight_SV: torch.Tensor, u_S: torch.Tensor) -> torch.Tensor:
    """First column whose cumulative weight exceeds u of the total: blocks first, then columns of the block found."""
    blocks_SNB = weight_SV.unflatten(1, (-1, _BLOCK))
    mass_SN = blocks_SNB.sum(dim=-1).double().cumsum(dim=-1)
    target_S1 = u_S[:, None] * mass_SN[:, -1:]
    block_S1 = _first_above(mass_SN, target_S1)
    before_S1 = torch.where(block_S1 > 0, mass_SN.gather(1, (block_S1 - 1).clamp(min=0)), 0.0)
    inside_SB = blocks_SNB[torch.arange(len(u_S), device=u_S.device), block_S1[:, 0]].double().cumsum(dim=-1)
    return (block_S1 * _BLOCK + _first_above(inside_SB, target_S1 - before_S1))[:, 0]


def _first_above(mass_SN: torch.Tensor, target_S1: torch.Tensor) -> torch.Tensor:
    """First place where a rising row exceeds the target; if rounding leaves none, the last place where it rises."""
    last_S1 = torch.searchsorted(mass_SN, mass_SN[:, -1:].contiguous()).clamp(max=mass_SN.shape[1] - 1)  # NaN: none
    return torch.minimum(torch.searchsorted(mass_SN, target_S1, right=True), last_S1)


def _least_kept(x_SV: torch.Tensor, weight_SV: torch.Tensor, settings: NDArray[np.float64]) -> torch.Tensor | None:
    """Smallest kept x of each row [S, 1], or None when nothing is cut off. x has maximum 0, weight = exp(x)."""
    _, top_k, top_p, min_p = settings.T
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return None
    with np.errstate(divide="ignore"):
        least_S1 = torch.from_numpy(np.log(min_p).astype(np.float32)).to(x_SV.device)[:, None]
    cut = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(cut):
        row = torch.from_numpy(cut).to(x_SV.device)
        x_JV, weight_JV = (x_SV, weight_SV) if len(cut) == len(x_SV) else (x_SV[row], weight_SV[row])
        cut_J1, known_J = threshold_of_top(x_JV, weight_JV, top_k[cut], top_p[cut])
        if not known_J.all():
            left = ~known_J.cpu().numpy()
            hard = torch.from_numpy(np.flatnonzero(left)).to(x_SV.device)
            cut_J1[hard] = threshold_of_all(x_JV[hard], weight_JV[hard], top_k[cut][left], top_p[cut][left])
        least_S1[row] = torch.maximum(least_S1[row], cut_J1)
    return least_S1


def threshold_of_top(
    x_SV: torch.Tensor, weight_SV: torch.Tensor, top_k: NDArray[np.float64], top_p: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest x that top_k and top_p keep [S, 1], found among the largest alone, and where it lies among them [S].

    A matter of each row alone, so that a row is treated alike in any company.
    """
    device, infinity = x_SV.device, float("inf")
    x_SL, _ = top_entries(x_SV, _LIKELIEST)
    k_S1, p_S1 = (torch.from_numpy(values).to(device)[:, None] for values in (top_k, top_p))
    place_S1 = k_S1.long().clamp(1, x_SL.shape[1]) - 1
    least_S1 = torch.where(k_S1 > 0, x_SL.gather(1, place_S1), -infinity)
    mass_SL = torch.where(x_SL < least_S1, 0.0, x_SL.exp().double())
    total_S1 = torch.where(k_S1 > 0, mass_SL.sum(dim=-1, keepdim=True), weight_SV.sum(dim=-1, keepdim=True).double())
    through_SL = mass_SL.cumsum(dim=-1)
    limit_S1 = p_S1 * total_S1
    last_S1 = (through_SL - mass_SL < limit_S1).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    reached_S1 = through_SL[:, -1:] >= limit_S1
    least_S1 = torch.where(p_S1 < 1, torch.maximum(least_S1, x_SL.gather(1, last_S1)), least_S1)
    return least_S1, ((k_S1 <= _LIKELIEST) & ((p_S1 >= 1) | reached_S1))[:, 0]


def threshold_of_all(
    x_SV: torch.Tensor, weight_SV: torch.Tensor, top_k: NDArray[np.float64], top_p: NDArray[np.float64]
) -> torch.Tensor:
    """The same for rows that keep very many: searched among all entries."""
    vocabulary, device = x_SV.shape[1], x_SV.device
    least_S1 = torch.full((len(x_SV), 1), float("-inf"), device=device)
    if top_k.any():
        limit_S1 = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary + 1)).to(device)[:, None]
        least_S1 = _largest_before(x_SV, None, limit_S1)
    if (top_p < 1).any():
        mass_SV = weight_SV.double()
        if top_k.any():
            mass_SV = mass_SV.masked_fill_(x_SV < least_S1, 0.0)
        share_S1 = torch.from_numpy(np.where(top_p < 1, top_p, 2.0)).to(device)[:, None]
        least_S1 = torch.maximum(least_S1, _largest_before(x_SV, mass_SV, share_S1 * mass_SV.sum(dim=-1, keepdim=True)))
    return least_S1


def _largest_before(x_SV: torch.Tensor, amount_SV: torch.Tensor | None, limit_S1: torch.Tensor) -> torch.Tensor:
    """Smallest x whose strictly larger ones amount to less than the limit [S, 1]; amount 1 each when None.

    A radix search over the bits of |x|, which rise as x <= 0 falls: exact, and no row is sorted.
    """
    rows = len(x_SV)
    bits_SV = x_SV.abs().view(torch.int32)
    high_SV = bits_SV >> _LOW_BITS
    offset_S1 = torch.arange(rows, device=x_SV.device)[:, None] << _HIGH_BITS
    before_SN = _sums_before((high_SV + offset_S1).flatten(), amount_SV, rows, _HIGH_BITS)
    bucket_S1 = (before_SN < limit_S1).sum(dim=-1, keepdim=True).clamp(min=1) - 1  # none: a row of NaN
    row, column = (high_SV == bucket_S1).nonzero(as_tuple=True)
    low = (bits_SV[row, column] & ((1 << _LOW_BITS) - 1)) + (row << _LOW_BITS)
    amount = None if amount_SV is None else amount_SV[row, column]
    inside_SN = _sums_before(low, amount, rows, _LOW_BITS) + before_SN.gather(1, bucket_S1)
    found_S1 = (bucket_S1 << _LOW_BITS) + (inside_SN < limit_S1).sum(dim=-1, keepdim=True) - 1
    return -found_S1.clamp(max=_INFINITY_BITS).to(torch.int32).view(torch.float32)


def _sums_before(key: torch.Tensor, amount: torch.Tensor | None, rows: int, bits: int) -> torch.Tensor:
    """Per row and bucket, the amounts of all earlier buckets, float64 [rows, 2 ** bits]."""
    weights = None if amount is None else amount.flatten()
    sums_SN = torch.bincount(key, weights=weights, minlength=rows << bits).double().view(rows, -1)
    return sums_SN.cumsum(dim=-1) - sums_SN
