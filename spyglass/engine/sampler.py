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

_CANDIDATES = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokens:
    """Distinct ids of one sequence's prompt and answer, and how often each stands in the answer."""

    ids_J: NDArray[np.int64]
    counts_J: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawStep:
    """What the sampler must know of the S rows of one step. `used` is None for rows without penalties.

    `seed_S`, `position_S` (of the token to be drawn) are uint64 and choose the random number of a row.
    """

    params: Sequence[SamplingParams]
    seed_S: NDArray[np.uint64]
    position_S: NDArray[np.uint64]
    used: Sequence[UsedTokens | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Chosen ids, log-probabilities of rows that asked for them, and whether the row held numbers at all (no NaN)."""

    ids: list[int]
    logprobs: list[TokenLogprob | None]
    sound: list[bool]


def draw(logits_SV: torch.Tensor, step: DrawStep, banned: torch.Tensor) -> Drawn:
    """One token per row. `logits_SV` fp32 is overwritten; `banned` int64 ids are never chosen."""
    tops = [p.logprobs for p in step.params]
    lse_S = torch.logsumexp(logits_SV, dim=-1) if any(top is not None for top in tops) else None
    raw_SV = logits_SV.clone() if lse_S is not None else logits_SV
    logits_SV.index_fill_(1, banned, float("-inf"))
    penalise(logits_SV, step.params, step.used)
    ids_S = _choose(logits_SV, step).clamp(max=logits_SV.shape[1] - 1)
    sound = logits_SV.gather(1, ids_S[:, None])[:, 0].isfinite().tolist()
    if lse_S is None:
        return Drawn(ids=ids_S.tolist(), logprobs=[None] * len(sound), sound=sound)
    return Drawn(ids=ids_S.tolist(), logprobs=logprobs_of(raw_SV, lse_S, ids_S, tops), sound=sound)


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
    """log softmax of each row's id and of its n likeliest, None where `tops` is; `lse_S` is the rows' logsumexp."""
    most = max((min(top, logits_SV.shape[1]) for top in tops if top is not None), default=0)
    chosen = (logits_SV.gather(1, ids_S[:, None])[:, 0] - lse_S).tolist()
    best = logits_SV.topk(most, dim=-1)
    top_ids, top_values = best.indices.tolist(), (best.values - lse_S[:, None]).tolist()
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


def _choose(logits_SV: torch.Tensor, step: DrawStep) -> torch.Tensor:
    """Greedy rows take the maximum, the others draw."""
    random = [s for s, p in enumerate(step.params) if p.temperature > 0]
    if len(random) < len(step.params):
        ids_S = logits_SV.argmax(dim=-1)
        if not random:
            return ids_S
        logits_SV = logits_SV[torch.as_tensor(random, device=logits_SV.device)]
    params = [step.params[s] for s in random]
    u_S = torch.from_numpy(uniform(step.seed_S[random], step.position_S[random])).to(logits_SV.device)
    drawn_S = _draw_random(logits_SV, params, u_S)
    if len(random) == len(step.params):
        return drawn_S
    ids_S[torch.as_tensor(random, device=ids_S.device)] = drawn_S
    return ids_S


def _draw_random(logits_SV: torch.Tensor, params: Sequence[SamplingParams], u_S: torch.Tensor) -> torch.Tensor:
    settings = np.array([(p.temperature, p.top_k, p.top_p, p.min_p) for p in params], np.float64)
    # subtracting first keeps tiny temperatures finite: the likeliest token stays at 0
    x_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
    x_SV = x_SV / torch.from_numpy(settings[:, :1].astype(np.float32)).to(x_SV.device)
    least_S1 = _least_kept(x_SV, settings)
    weight_SV = x_SV.exp()
    if least_S1 is not None:
        weight_SV = torch.where(x_SV >= least_S1, weight_SV, 0.0)
    mass_SV = weight_SV.cumsum(dim=-1, dtype=torch.float64)
    ids_S1 = torch.searchsorted(mass_SV, u_S[:, None] * mass_SV[:, -1:], right=True)
    return ids_S1[:, 0]


def _least_kept(x_SV: torch.Tensor, settings: NDArray[np.float64]) -> torch.Tensor | None:
    """Smallest kept x of each row [S, 1], or None when nothing is cut off. x has maximum 0."""
    vocabulary = x_SV.shape[1]
    _, top_k, top_p, min_p = settings.T
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return None
    with np.errstate(divide="ignore"):
        least_S1 = torch.from_numpy(np.log(min_p).astype(np.float32)).to(x_SV.device)[:, None]
    if not (top_k.any() or (top_p < 1).any()):
        return least_S1
    k = np.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).astype(np.int64)
    p_S1 = torch.from_numpy(top_p).to(x_SV.device)[:, None]
    wanted = int(k[k < vocabulary].max(initial=0))
    best_SN = x_SV.topk(min(vocabulary, max(_CANDIDATES, wanted)), dim=-1).values
    kept_S1, sure = _least_of_sorted(x_SV, best_SN, k, p_S1)
    if not sure:
        kept_S1, _ = _least_of_sorted(x_SV, x_SV.sort(dim=-1, descending=True).values, k, p_S1)
    return torch.maximum(least_S1, kept_S1)


def _least_of_sorted(
    x_SV: torch.Tensor, best_SN: torch.Tensor, k: NDArray[np.int64], p_S1: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """Smallest x that top_k and top_p keep, from the N largest x in falling order; and whether N were enough."""
    vocabulary, enough = x_SV.shape[1], best_SN.shape[1]
    column_S1 = torch.from_numpy(np.minimum(k, enough) - 1).to(x_SV.device)[:, None]
    least_S1 = best_SN.gather(1, column_S1)
    least_S1 = torch.where(torch.from_numpy(k >= vocabulary).to(x_SV.device)[:, None], float("-inf"), least_S1)
    total_S1 = torch.where(x_SV >= least_S1, x_SV.exp(), 0.0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    weight_SN = best_SN.exp().double()
    before_SN = weight_SN.cumsum(dim=-1) - weight_SN
    inside_SN = (before_SN < p_S1 * total_S1) & (best_SN >= least_S1)
    count_S1 = inside_SN.sum(dim=-1, keepdim=True)
    nucleus_S1 = best_SN.gather(1, (count_S1 - 1).clamp(min=0))
    undecided_S1 = (count_S1 == enough) & (p_S1 < 1)
    kept_S1 = torch.where(p_S1 < 1, nucleus_S1, least_S1)
    return kept_S1, enough == vocabulary or not bool(undecided_S1.any())
