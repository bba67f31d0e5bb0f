"""Which tokens top_k, top_p and min_p keep: a threshold for each row, as `sampler` defines it.

On a GPU it comes from sorted rows. On a CPU it is searched, which takes a fraction of the time but needs to know how
many entries were found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.engine.request import SamplingParams
from spyglass.engine.transfer import to_device

BLOCK = 256  # columns that are looked at or summed together
_LOW_BITS, _HIGH_BITS = 16, 15  # of the 31 bits of a float's magnitude, for the search of a threshold
_INFINITY_BITS = 0x7F800000
_TOP_BLOCKS = 64  # blocks whose best entries are looked at before all are
_COLDEST = 1e-30  # temperatures below draw the same tokens, and would be 0 in float32


def block_maxima(x_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of every whole block of BLOCK columns [S, N], and the columns behind them."""
    whole = x_SV.shape[1] // BLOCK * BLOCK
    return x_SV[:, :whole].unflatten(1, (-1, BLOCK)).amax(dim=-1), x_SV[:, whole:]


def top_entries(x_SV: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entries of each row, falling, and their columns, [S, L]; rows with fewer than others end with -inf.

    They are all that reach the maximum of the `blocks`-th best block of columns: at least so many, usually few more.
    """
    best_SN, rest_SV = block_maxima(x_SV)
    rows, number = best_SN.shape
    best = best_SN.topk(min(blocks, number), dim=-1)
    every_S1 = torch.arange(rows, device=x_SV.device)[:, None]
    inside_SJ = x_SV[:, : number * BLOCK].unflatten(1, (-1, BLOCK))[every_S1, best.indices].flatten(1)
    value_SJ = torch.cat([inside_SJ, rest_SV], dim=1)  # the last columns are less than a block
    wanted_SJ = value_SJ >= (best.values[:, -1:] if blocks < number else float("-inf"))
    row, place = wanted_SJ.nonzero(as_tuple=True)
    first_SM = torch.cat([best.indices, best.indices.new_full((rows, 1), number)], dim=1) * BLOCK
    column = first_SM[row, place // BLOCK] + place % BLOCK
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
    temperature_S1 = to_device(settings[:, :1].astype(np.float32), logits_SV.device)
    # subtracting first keeps tiny temperatures finite: the most likely token stays at 0
    x_SV = logits_SV.sub_(logits_SV.amax(dim=-1, keepdim=True)).div_(temperature_S1)
    weight_SV = x_SV.new_zeros(len(x_SV), -(-vocabulary // BLOCK) * BLOCK)
    torch.exp(x_SV, out=weight_SV[:, :vocabulary])
    min_S1 = _min_kept(x_SV, weight_SV[:, :vocabulary], settings)
    if min_S1 is not None:
        # a product with 0 or 1: a fill under a mask that nobody can foresee takes five times as long
        weight_SV[:, :vocabulary].mul_(torch.ge(x_SV, min_S1, out=torch.empty_like(x_SV)))
    return weight_SV


def _min_kept(x_SV: torch.Tensor, weight_SV: torch.Tensor, settings: NDArray[np.float64]) -> torch.Tensor | None:
    """Smallest kept x of each row [S, 1], or None when nothing is cut off. x has maximum 0, weight = exp(x)."""
    _, top_k, top_p, min_p = settings.T
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return None
    with np.errstate(divide="ignore"):
        min_S1 = to_device(np.log(min_p).astype(np.float32), x_SV.device)[:, None]
    cut = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(cut):
        row = to_device(cut, x_SV.device)
        x_JV, weight_JV = (x_SV, weight_SV) if len(cut) == len(x_SV) else (x_SV[row], weight_SV[row])
        if x_SV.device.type != "cpu":
            sorted_JV = x_JV.sort(dim=-1, descending=True).values
            min_S1[row] = torch.maximum(
                min_S1[row], threshold_of_sorted(sorted_JV, weight_JV, top_k[cut], top_p[cut])[0]
            )
            return min_S1
        cut_J1, known_J = threshold_of_top(x_JV, weight_JV, top_k[cut], top_p[cut])
        if not known_J.all():
            left = ~known_J.cpu().numpy()
            hard = torch.from_numpy(np.flatnonzero(left)).to(x_SV.device)
            cut_J1[hard] = threshold_of_all(x_JV[hard], weight_JV[hard], top_k[cut][left], top_p[cut][left])
        min_S1[row] = torch.maximum(min_S1[row], cut_J1)
    return min_S1


def threshold_of_top(
    x_SV: torch.Tensor, weight_SV: torch.Tensor, top_k: NDArray[np.float64], top_p: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest x that top_k and top_p keep [S, 1], found among the largest alone, and where it lies among them [S].

    A matter of each row alone, so that a row is treated alike in any company.
    """
    x_SL, _ = top_entries(x_SV, _TOP_BLOCKS)
    min_S1, reached_S1 = threshold_of_sorted(x_SL, weight_SV, top_k, top_p)
    return min_S1, torch.from_numpy(top_k <= _TOP_BLOCKS) & (torch.from_numpy(top_p >= 1) | reached_S1[:, 0])


def threshold_of_sorted(
    x_SL: torch.Tensor, weight_SV: torch.Tensor, top_k: NDArray[np.float64], top_p: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest x that top_k and top_p keep [S, 1], if it is among `x_SL`, the largest of each row falling; and whether
    these reach top_p."""
    device, infinity = x_SL.device, float("inf")
    k_S1, p_S1 = (to_device(values, device)[:, None] for values in (top_k, top_p))
    place_S1 = k_S1.long().clamp(1, x_SL.shape[1]) - 1
    min_S1 = torch.where(k_S1 > 0, x_SL.gather(1, place_S1), -infinity)
    mass_SL = torch.where(x_SL < min_S1, 0.0, x_SL.exp().double())
    total_S1 = torch.where(k_S1 > 0, mass_SL.sum(dim=-1, keepdim=True), weight_SV.sum(dim=-1, keepdim=True).double())
    through_SL = mass_SL.cumsum(dim=-1)
    limit_S1 = p_S1 * total_S1
    last_S1 = (through_SL - mass_SL < limit_S1).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    reached_S1 = through_SL[:, -1:] >= limit_S1
    min_S1 = torch.where(p_S1 < 1, torch.maximum(min_S1, x_SL.gather(1, last_S1)), min_S1)
    return min_S1, reached_S1


def threshold_of_all(
    x_SV: torch.Tensor, weight_SV: torch.Tensor, top_k: NDArray[np.float64], top_p: NDArray[np.float64]
) -> torch.Tensor:
    """The same for rows that keep very many: searched among all entries."""
    vocabulary, device = x_SV.shape[1], x_SV.device
    min_S1 = torch.full((len(x_SV), 1), float("-inf"), device=device)
    if top_k.any():
        limit_S1 = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary + 1)).to(device)[:, None]
        min_S1 = _largest_before(x_SV, None, limit_S1)
    if (top_p < 1).any():
        mass_SV = weight_SV.double()
        if top_k.any():
            mass_SV = mass_SV.masked_fill_(x_SV < min_S1, 0.0)
        share_S1 = torch.from_numpy(np.where(top_p < 1, top_p, 2.0)).to(device)[:, None]
        min_S1 = torch.maximum(min_S1, _largest_before(x_SV, mass_SV, share_S1 * mass_SV.sum(dim=-1, keepdim=True)))
    return min_S1


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
