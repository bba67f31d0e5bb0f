"""From token classes to table rows (spec v41 5.2, 5.3).

    r_1 = t_0 m_0,   r_n = r_{n-1} xor t_{n-1} m_{n-1},   row of column (n, head) = r_n mod prime + offset

t_s is the class of the token s places back, or the pad class when that token or any nearer one is dead: before the
start of the sequence, or part of an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from spyglass.config.model import EngramConfig
from spyglass.errors import ConfigError

_SEED_STEP = 10007


@dataclass(frozen=True, slots=True, kw_only=True)
class HashConstants:
    """One layer's numbers. J = columns of one n-gram size times sizes, n-major.

    `multipliers_L` int64 [max_ngram], odd; `primes_J` int64 moduli; `offsets_J` int64 first table row of each column.
    """

    layer: int
    multipliers_L: NDArray[np.int64]
    primes_J: NDArray[np.int64]
    offsets_J: NDArray[np.int64]


def hash_constants(engram: EngramConfig) -> tuple[HashConstants, ...]:
    """The constants of every engram layer, by the release's rule.

    Raises:
        ConfigError: the tables do not have as many rows as the primes add up to.
    """
    constants = []
    for layer, num_rows, primes in zip(engram.layers, engram.num_rows, table_primes(engram), strict=True):
        rng = np.random.default_rng(_SEED_STEP * layer)
        most = (2**63 - 1) // engram.num_classes // 2
        multipliers = rng.integers(0, most, engram.max_ngram, dtype=np.int64) * 2 + 1
        if sum(primes) != num_rows:
            raise ConfigError(
                f"engram_num_embeddings says {num_rows} rows for layer {layer}, the {len(primes)} primes from "
                f"engram_vocab_size {engram.prime_above} on add up to {sum(primes)}; one of the fields is wrong"
            )
        primes_J = np.array(primes, np.int64)
        constants.append(
            HashConstants(
                layer=layer,
                multipliers_L=multipliers,
                primes_J=primes_J,
                offsets_J=np.cumsum(primes_J) - primes_J,
            )
        )
    return tuple(constants)


def table_primes(engram: EngramConfig) -> list[list[int]]:
    """Moduli of every layer's columns: each size of n-gram takes the next primes that no other has taken."""
    taken: set[int] = set()
    return [
        [
            prime
            for _ in range(2, engram.max_ngram + 1)
            for prime in _next_primes(engram.prime_above - 1, engram.num_heads, taken)
        ]
        for _ in engram.layers
    ]


def row_ids(
    ids_T: NDArray[np.int32],
    kinds_T: NDArray[np.int8],
    lookback_SL: NDArray[np.int32],
    query_start_S: NDArray[np.int32],
    *,
    classes_V: NDArray[np.int32],
    pad_token_id: int,
    constants: tuple[HashConstants, ...],
) -> dict[int, NDArray[np.int64]]:
    """Table rows of T packed tokens of S sequences: layer -> int64 [T, J].

    `kinds_T` TokenKind (-1 = text, others are dead); `lookback_SL` int32 ids before each sequence's first row, nearest
    first, negative = dead; `query_start_S` int32 [S + 1] first row of each sequence.
    """
    tokens_TL = _looking_back(np.where(kinds_T < 0, ids_T, -1), lookback_SL, query_start_S)
    alive_TL = np.logical_and.accumulate(tokens_TL >= 0, axis=1)
    classes_TL = classes_V[np.where(alive_TL, tokens_TL, pad_token_id)].astype(np.int64)
    return {layer.layer: _hash(classes_TL, layer) for layer in constants}


def _looking_back(
    ids_T: NDArray[np.int32], lookback_SL: NDArray[np.int32], query_start_S: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Each token and the L before it, nearest first [T, 1 + L]; those before the step come from the look-back."""
    depth = lookback_SL.shape[1]
    seq_T = np.repeat(np.arange(len(query_start_S) - 1), np.diff(query_start_S))
    offset_TL = np.arange(len(ids_T))[:, None] - np.arange(1 + depth)
    missing_TL = query_start_S[seq_T][:, None] - offset_TL
    out = ids_T[np.maximum(offset_TL, 0)]
    before = missing_TL > 0
    out[before] = lookback_SL[np.broadcast_to(seq_T[:, None], before.shape)[before], missing_TL[before] - 1]
    return out


def _hash(classes_TL: NDArray[np.int64], layer: HashConstants) -> NDArray[np.int64]:
    heads = len(layer.primes_J) // (len(layer.multipliers_L) - 1)
    mixed = np.bitwise_xor.accumulate(classes_TL * layer.multipliers_L, axis=1)
    return np.repeat(mixed[:, 1:], heads, axis=1) % layer.primes_J + layer.offsets_J


def _next_primes(above: int, count: int, taken: set[int]) -> list[int]:
    """The next `count` primes above a number that are not taken yet; they are then."""
    found: list[int] = []
    candidate = above
    while len(found) < count:
        candidate += 1
        if candidate not in taken and _is_prime(candidate):
            found.append(candidate)
    taken.update(found)
    return found


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % divisor for divisor in range(3, isqrt(number) + 1, 2))
