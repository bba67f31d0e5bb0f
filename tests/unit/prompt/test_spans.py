"""Token blocks against the definition, cell by cell, and against the properties that ratio-4 layers rely on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.prompt import ImagePlan, TokenKind, span_v4, span_v41

SIDES = st.integers(1, 30)
# spec v4 9.5: (rows, columns, start), types, order
V4_EXAMPLES = [
    ((2, 2, 7), [0, 2, 2, 2, 2, 3, 3, 1, 1, 4], [0, 2, 1, 3]),
    ((3, 2, 5), [1, 1, 0, 2, 2, 2, 2, 3, 3, 2, 1, 2, 1, 3, 1, 4], [0, 2, 1, 3, 4, 5]),
    ((2, 3, 0), [1, 1, 1, 0, 2, 2, 2, 2, 2, 2, 3, 3, 4], [0, 3, 1, 4, 2, 5]),
    ((1, 1, 4), [1, 1, 1, 0, 2, 1, 3, 1, 4], [0]),
]


def plan_of(rows: int, columns: int) -> ImagePlan:
    return ImagePlan(
        resized=(columns * 42, rows * 42),
        vit_grid=(rows * 3, columns * 3),
        llm_grid=(rows, columns),
        num_tokens=0,
        stretch=False,
        patch_size=14,
    )


def block_by_definition(rows: int, columns: int, start: int) -> tuple[list[int], list[int]]:
    """Spec v4 9.5, step by step."""
    virtual = [[TokenKind.IMAGE] * columns + [TokenKind.NEWLINE] for _ in range(rows)]
    if rows % 2:
        virtual.append([TokenKind.PAD] * (columns + 1))
    body, order = [], []
    for pair in range(0, len(virtual), 2):
        for column in range(columns + 1):
            for row in (pair, pair + 1):
                body.append(virtual[row][column])
                if virtual[row][column] is TokenKind.IMAGE:
                    order.append(row * columns + column)
    if (len(body) // 2) % 2:
        body += [TokenKind.PAD] * 2
    lead = [TokenKind.PAD] * (3 - start % 4)
    return [int(kind) for kind in (*lead, TokenKind.START, *body, TokenKind.END)], order


@pytest.mark.parametrize(("case", "kinds", "order"), V4_EXAMPLES)
def test_v4_examples(case: tuple[int, int, int], kinds: list[int], order: list[int]) -> None:
    rows, columns, start = case
    span = span_v4.layout(plan_of(rows, columns), start)
    assert (span.kinds.tolist(), span.order.tolist()) == (kinds, order)


@given(rows=SIDES, columns=SIDES, start=st.integers(0, 100_000))
def test_v4_blocks_follow_the_definition(rows: int, columns: int, start: int) -> None:
    span = span_v4.layout(plan_of(rows, columns), start, image=5)
    kinds, order = block_by_definition(rows, columns, start)
    assert (span.kinds.tolist(), span.order.tolist()) == (kinds, order)
    assert (span.start, span.lead, span.image) == (start, 3 - start % 4, 5)
    assert span.length - span.lead == span_v4.num_tokens(rows, columns)


@given(rows=SIDES, columns=SIDES, start=st.integers(0, 1000))
def test_v4_blocks_stand_on_groups_of_four(rows: int, columns: int, start: int) -> None:
    span = span_v4.layout(plan_of(rows, columns), start)
    first, last = start + span.lead, start + span.length - 1
    assert (first % 4, last % 4) == (3, 0)
    assert span.kinds[span.lead] == TokenKind.START
    assert span.kinds[-1] == TokenKind.END
    assert span_v4.num_tokens(rows, columns) % 4 == 2
    assert sorted(span.order.tolist()) == list(range(rows * columns))


@pytest.mark.parametrize("shape", [(4, 5), (2, 1), (6, 7)])
def test_where_rows_have_an_even_length_a_group_of_four_is_two_by_two_cells(shape: tuple[int, int]) -> None:
    rows, columns = shape
    span = span_v4.layout(plan_of(rows, columns), 0)
    turns = iter(span.order.tolist())
    body = span.kinds[span.lead + 1 : -1]
    for group in body.reshape(-1, 4):
        cells = [divmod(next(turns), columns) for kind in group if kind == TokenKind.IMAGE]
        tops = {row // 2 for row, _ in cells}
        lefts = {column // 2 for _, column in cells}
        assert len(tops) == len(lefts) == 1


def test_pads_depend_on_where_the_block_starts() -> None:
    plan = plan_of(7, 14)
    assert [span_v4.layout(plan, start).length for start in range(4)] == [125, 124, 123, 122]
    assert {span_v41.layout(plan, start).length for start in range(4)} == {7 * 15 + 2}


@given(rows=SIDES, columns=SIDES, start=st.integers(0, 1000))
def test_v41_spans_are_in_reading_order(rows: int, columns: int, start: int) -> None:
    span = span_v41.layout(plan_of(rows, columns), start, image=2)
    kinds = [TokenKind.START, *([TokenKind.IMAGE] * columns + [TokenKind.NEWLINE]) * rows, TokenKind.END]
    assert span.kinds.tolist() == kinds
    assert span.order.tolist() == list(range(rows * columns))
    assert (span.start, span.lead, span.image) == (start, 0, 2)
    assert span.length == span_v41.num_tokens(rows, columns)
