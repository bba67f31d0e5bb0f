"""Two-level selection: which blocks stay, which entries may then be picked (spec v41 3.3)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spyglass.ops.index_blocks.reference import best_blocks, index_blocks
from spyglass.ops.index_topk.reference import allowed, index_topk

NONE = float("-inf")


def blocks_of(scores: list[float], visible: int, num_blocks: int, block_size: int) -> list[int]:
    masked = [score if place < visible else NONE for place, score in enumerate(scores)]
    found = best_blocks(
        torch.tensor([masked], dtype=torch.float32),
        torch.tensor([visible]),
        num_blocks=num_blocks,
        block_size=block_size,
    )
    return found[0].tolist()


def test_the_printed_example() -> None:
    scores = [5, 1, 0, 0, 9, 0, 0, 0, 2, 2, 2, 2, 1, 0, NONE]
    assert blocks_of(scores, 14, 2, 4) == [1, 3]


def test_the_newest_block_is_always_kept_however_low_it_scores() -> None:
    assert blocks_of([9, 9, 8, 8, 7, 7, -5, -6], 8, 2, 2) == [0, 3]
    assert blocks_of([9, 9, 8, 8, 7, 7, -5, -6], 7, 2, 2) == [0, 3]
    assert blocks_of([9, 9, 8, 8, 7, 7, -5, -6], 6, 2, 2) == [0, 2]


def test_a_block_counts_as_its_best_entry_and_ties_go_to_the_lowest() -> None:
    assert blocks_of([0, 9, 5, 5, 5, 5, 0, 0], 8, 2, 2) == [0, 3]
    assert blocks_of([3, 0, 0, 3, 3, 3, 0, 0], 8, 3, 2) == [0, 1, 3]


def test_blocks_without_a_visible_entry_are_no_candidates() -> None:
    assert blocks_of([1, 1, 1, 1, 1, 1], 2, 3, 2) == [0, -1, -1]
    assert set(blocks_of([1, 1, 1, 1], 0, 2, 2)) == {-1}


def test_a_short_last_block_counts() -> None:
    assert blocks_of([1, 2, 3, 4, 5], 5, 1, 2) == [2]
    assert blocks_of([1, 2, 3, 4, 5], 5, 9, 2) == [0, 1, 2]


def test_listed_blocks_cover_their_entries_and_nothing_else() -> None:
    got = allowed(torch.tensor([[0, 2, -1], [-1, -1, -1]], dtype=torch.int32), 3, 8)
    assert got.int().tolist() == [[1, 1, 1, 0, 0, 0, 1, 1], [0] * 8]


def scored(length: int, entries: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of both ops: one sequence, pages of 4 rows in a shuffled order."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-entries // 4)
    return {
        "q_TNI": torch.randn(length, 5, 8, generator=generator),
        "weights_TN": torch.randn(length, 5, generator=generator),
        "keys_NBI": torch.randn(pages, 4, 8, generator=generator),
        "table_SP": torch.randperm(pages, generator=generator).int()[None],
        "seq_T": torch.zeros(length, dtype=torch.int32),
        "visible_T": torch.randint(0, entries + 1, (length,), generator=generator).int(),
    }


@pytest.mark.parametrize("stepwise", [False, True])
def test_picks_within_blocks_are_the_best_of_the_allowed_ones(stepwise: bool) -> None:
    args = scored(50, 37)
    blocks = index_blocks(**args, num_blocks=4, block_size=3, max_visible=37, stepwise=stepwise)
    topk_indices = index_topk(**args, k=6, max_visible=37, stepwise=stepwise, blocks_TY=blocks, block_size=3)
    everything = index_topk(**args, k=37, max_visible=37, stepwise=stepwise)
    free = index_topk(**args, k=6, max_visible=37, stepwise=stepwise)
    restricted = 0
    for t, listed in enumerate(blocks.tolist()):
        reachable = {3 * b + i for b in listed if b >= 0 for i in range(3)} & set(everything[t].tolist())
        mine = {entry for entry in topk_indices[t].tolist() if entry >= 0}
        assert mine <= reachable and len(mine) == min(6, len(reachable))
        best = {entry for entry in free[t].tolist() if entry >= 0}
        assert best & reachable <= mine, "an allowed entry among the best of all is among the best of the allowed"
        restricted += mine != best
    assert restricted > 10


@given(st.integers(1, 40), st.integers(1, 5))
def test_enough_blocks_restrict_nothing(entries: int, block_size: int) -> None:
    args = scored(6, entries, seed=entries)
    blocks = index_blocks(
        **args, num_blocks=-(-entries // block_size), block_size=block_size, max_visible=entries, stepwise=False
    )
    limited = index_topk(**args, k=7, max_visible=entries, stepwise=False, blocks_TY=blocks, block_size=block_size)
    assert torch.equal(limited, index_topk(**args, k=7, max_visible=entries, stepwise=False))


def test_each_query_has_its_own_blocks_and_batches_change_nothing() -> None:
    args = scored(30, 29, seed=7)
    whole = index_blocks(**args, num_blocks=3, block_size=4, max_visible=29, stepwise=False)
    assert len({tuple(row) for row in whole.tolist()}) > 5
    for t in (0, 11, 29):
        alone = {key: value if key in ("keys_NBI", "table_SP") else value[t : t + 1] for key, value in args.items()}
        assert torch.equal(
            index_blocks(**alone, num_blocks=3, block_size=4, max_visible=29, stepwise=False)[0], whole[t]
        )
