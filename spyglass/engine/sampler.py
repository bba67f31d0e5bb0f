"""From logits to token ids, for all sampled rows of a step at once, without waiting for the device.

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
from spyglass.engine.thresholds import BLOCK, block_maxima, kept_weights, top_entries
from spyglass.engine.transfer import to_device, to_host

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedTokens:
    """Distinct ids of one sequence's prompt and answer, and how often each stands in the answer."""

    ids_J: NDArray[np.int64]
    counts_J: NDArray[np.float32]

    def copy(self) -> UsedTokens:
        """The same, which stays as it is."""
        return UsedTokens(ids_J=self.ids_J.copy(), counts_J=self.counts_J.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleInput:
    """What the sampler must know of the S rows of one step. `used` is None for rows without penalties.

    `allowed` bool [S', V], on the host, are the next tokens of the rows `grammar_rows`, whose answers follow a grammar.
    `seed_S`, `position_S` (of the token to be drawn), below 2 ** 64, choose the random number of a row.
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
    is_finite: list[bool]


class PendingTokens:
    """Sampled ids int64 [S] on the device, `ids_S`, which are on their way to the host.

    `value_S`: what each was chosen for; `logprobs`: those of chosen ids fp32 [S], and of the top entries ids and values
    [S, L]; `tops`: how many of these each row wants.
    """

    def __init__(
        self,
        ids_S: torch.Tensor,
        value_S: torch.Tensor,
        logprobs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        tops: Sequence[int | None] = (),
    ) -> None:
        self.ids_S, self._tops = ids_S, tops
        self._host = [to_host(tensor) for tensor in (ids_S, value_S.isfinite(), *(logprobs or ()))]
        self._copied: torch.cuda.Event | None = None
        if ids_S.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> SampledTokens:
        """The tokens on the host; waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        ids, is_finite, *more = (tensor.tolist() for tensor in self._host)
        logprobs: list[TokenLogprob | None] = [None] * len(ids)
        if more:
            chosen, top_ids, top_values = more
            logprobs = _token_logprobs(ids, chosen, top_ids, top_values, self._tops)
        return SampledTokens(ids=ids, logprobs=logprobs, is_finite=is_finite)


def sample(logits_SV: torch.Tensor, step: SampleInput, banned: torch.Tensor) -> PendingTokens:
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
    value_S = logits_SV.gather(1, ids_S[:, None])[:, 0]
    if lse_S is None:
        return PendingTokens(ids_S, value_S)
    return PendingTokens(ids_S, value_S, _logprobs(raw_SV, lse_S, ids_S, tops), tops)


def restrict(logits_SV: torch.Tensor, rows: Sequence[int], allowed: torch.Tensor) -> torch.Tensor:
    """Leave rows `rows` only the tokens that `allowed` bool [len(rows), V] names, in place."""
    row_J = to_device(np.array(rows, np.int64), logits_SV.device)
    banned_JV = ~to_device(allowed, logits_SV.device)
    logits_SV[row_J] = logits_SV[row_J].masked_fill_(banned_JV, float("-inf"))
    return logits_SV


def add_biases(logits_SV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """l <- l + bias of each token that a row's `logit_bias` names, in place."""
    listed = [(s, token, bias) for s, p in enumerate(params) for token, bias in p.logit_bias.items()]
    if listed:
        row_J, id_J, bias_J = (
            to_device(np.array(column, dtype), logits_SV.device)
            for column, dtype in zip(zip(*listed, strict=True), (np.int64, np.int64, np.float32), strict=True)
        )
        logits_SV[row_J, id_J] += bias_J
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
    row_J = to_device(np.repeat(rows, lengths), device)
    id_J = to_device(np.concatenate([tokens.ids_J for tokens in listed]), device)
    count_J = to_device(np.concatenate([tokens.counts_J for tokens in listed]), device)
    chosen = [params[s] for s in rows]
    values = np.array([(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in chosen], np.float32)
    repetition_J, frequency_J, presence_J = to_device(np.repeat(values, lengths, axis=0), device).unbind(1)
    logit_J = logits_SV[row_J, id_J]
    logit_J = torch.where(logit_J > 0, logit_J / repetition_J, logit_J * repetition_J)
    logit_J = logit_J - frequency_J * count_J - presence_J * (count_J > 0)
    logits_SV[row_J, id_J] = logit_J
    return logits_SV


def logprobs_of(
    logits_SV: torch.Tensor, lse_S: torch.Tensor, ids_S: torch.Tensor, tops: Sequence[int | None]
) -> list[TokenLogprob | None]:
    """log softmax of each row's id and of its n top entries, None where `tops` is; `lse_S` is the rows' logsumexp."""
    chosen_S, top_id_SL, top_SL = _logprobs(logits_SV, lse_S, ids_S, tops)
    return _token_logprobs(ids_S.tolist(), chosen_S.tolist(), top_id_SL.tolist(), top_SL.tolist(), tops)


def _logprobs(
    logits_SV: torch.Tensor, lse_S: torch.Tensor, ids_S: torch.Tensor, tops: Sequence[int | None]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log softmax of the ids [S]; ids and log softmax of the top entries [S, L]."""
    count = max((min(top, logits_SV.shape[1]) for top in tops if top is not None), default=0)
    chosen_S = logits_SV.gather(1, ids_S[:, None])[:, 0] - lse_S
    if logits_SV.device.type == "cpu":
        value_SL, column_SL = top_entries(logits_SV, max(count, 1))
    else:
        value_SL, column_SL = logits_SV.topk(count, dim=-1)
    return chosen_S, column_SL[:, :count], value_SL[:, :count] - lse_S[:, None]


def _token_logprobs(
    ids: Sequence[int],
    chosen: Sequence[float],
    top_ids: Sequence[Sequence[int]],
    top_values: Sequence[Sequence[float]],
    tops: Sequence[int | None],
) -> list[TokenLogprob | None]:
    return [
        None
        if top is None
        else TokenLogprob(
            token_id=token, logprob=value, top=tuple(zip(top_ids[s][:top], top_values[s][:top], strict=True))
        )
        for s, (token, value, top) in enumerate(zip(ids, chosen, tops, strict=True))
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
        ids_S = argmax(logits_SV)
        if not random:
            return ids_S
        row_J = to_device(np.array(random, np.int64), logits_SV.device)
        logits_SV = logits_SV[row_J]
    params = [step.params[s] for s in random]
    seed_S, position_S = (np.array([each[s] for s in random], np.uint64) for each in (step.seed_S, step.position_S))
    u_S = to_device(uniform(seed_S, position_S), logits_SV.device)
    drawn_S = inverse_draw(kept_weights(logits_SV, params), u_S)
    if len(random) == len(step.params):
        return drawn_S
    ids_S[row_J] = drawn_S
    return ids_S


def argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    """torch's `argmax` of each row, int64 [S]: the first of equals, a NaN before all numbers.

    torch's own reads a CPU's memory one number at a time; the maxima of blocks of columns, ten times as fast.
    """
    best_SN, rest_SV = block_maxima(logits_SV)
    if rest_SV.shape[1]:
        best_SN = torch.cat([best_SN, rest_SV.amax(dim=-1, keepdim=True)], dim=1)
    first_S1 = best_SN.argmax(dim=-1, keepdim=True) * BLOCK
    column_SB = first_S1 + torch.arange(BLOCK, device=logits_SV.device)
    return first_S1[:, 0] + logits_SV.gather(1, column_SB.clamp_(max=logits_SV.shape[1] - 1)).argmax(dim=-1)


def inverse_draw(weight_SV: torch.Tensor, u_S: torch.Tensor) -> torch.Tensor:
    """First column whose cumulative weight exceeds u of the total: blocks first, then columns of the block found."""
    blocks_SNB = weight_SV.unflatten(1, (-1, BLOCK))
    mass_SN = blocks_SNB.sum(dim=-1).double().cumsum(dim=-1)
    target_S1 = u_S[:, None] * mass_SN[:, -1:]
    block_S1 = _first_above(mass_SN, target_S1)
    before_S1 = torch.where(block_S1 > 0, mass_SN.gather(1, (block_S1 - 1).clamp(min=0)), 0.0)
    inside_SB = blocks_SNB[torch.arange(len(u_S), device=u_S.device), block_S1[:, 0]].double().cumsum(dim=-1)
    return (block_S1 * BLOCK + _first_above(inside_SB, target_S1 - before_S1))[:, 0]


def _first_above(mass_SN: torch.Tensor, target_S1: torch.Tensor) -> torch.Tensor:
    """First column where a rising row exceeds the target; if rounding leaves none, the last column where it rises."""
    last_S1 = torch.searchsorted(mass_SN, mass_SN[:, -1:].contiguous()).clamp(max=mass_SN.shape[1] - 1)  # NaN: none
    return torch.minimum(torch.searchsorted(mass_SN, target_S1, right=True), last_S1)
