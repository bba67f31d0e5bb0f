"""The defining attention op against float64, term by term, over shuffled pages of NaN (spec v4 4.5, 6.1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.sparse_attention.reference import sparse_attention
from tests.ops.paged import Paged
from tests.tolerance import OP_FLOAT32, assert_close

D = 24


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def formula(q: Any, keys: list[Any], sink: Any, scale: float) -> np.ndarray:
    """One query and head at a time; `keys[t]` are the rows that query t sees."""
    out = np.zeros(q.shape)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            if len(keys[t]):
                weights = np.exp(keys[t] @ q[t, h] * scale)
                out[t, h] = weights @ keys[t] / (weights.sum() + np.exp(sink[h]))
    return out


class Case:
    """Three sequences of 9, 5 and 30 window rows with 4, 0 and 13 pool rows; 70 queries, so two blocks are needed."""

    def __init__(self) -> None:
        random = np.random.default_rng(1)
        self.window_rows = [torch.randn(n, D) for n in (9, 5, 30)]
        self.pool_rows = [torch.randn(n, D) for n in (4, 0, 13)]
        self.window, self.pool = Paged(self.window_rows, 4, [2, 0, 7]), Paged(self.pool_rows, 3)
        self.seq = random.integers(0, 3, 70)
        lengths = np.array([9, 5, 30])[self.seq]
        first = np.array([2, 0, 7])[self.seq]
        self.lo = random.integers(first, lengths)
        self.hi = np.minimum(self.lo + random.integers(-1, 9, 70), lengths - 1)
        self.visible = random.integers(0, np.array([4, 0, 13])[self.seq] + 1)
        topk_indices = [random.permutation(14)[:6] for _ in range(70)]
        self.topk_indices = np.sort(np.where(random.random((70, 6)) < 0.3, -1, np.array(topk_indices)))
        self.q, self.sink = torch.randn(70, 5, D), torch.randn(5)

    def run(self, pool: bool = True, topk_indices: bool = False, **changes: Any) -> torch.Tensor:
        pooled = {
            "pool_NBD": self.pool.pages,
            "pool_table_SP": self.pool.table,
            "visible_T": ints(self.visible),
            "topk_indices_TX": ints(self.topk_indices) if topk_indices else None,
            "pool_width": 6 if topk_indices else 13,
        }
        arguments = {
            "scale": 0.3,
            "window_width": int((self.hi - self.lo).max()) + 1,
            **(pooled if pool else {}),
            **changes,
        }
        return sparse_attention(
            self.q,
            self.window.pages,
            self.window.table,
            ints(self.seq),
            ints(self.lo),
            ints(self.hi),
            self.sink,
            **arguments,
        )

    def expected(self, pool: bool = True, topk_indices: bool = False) -> np.ndarray:
        keys = []
        for t, s in enumerate(self.seq):
            mine = list(self.window_rows[s][self.lo[t] : self.hi[t] + 1])
            chosen = self.topk_indices[t] if topk_indices else range(13)
            if pool:
                mine += [self.pool_rows[s][p] for p in chosen if 0 <= p < self.visible[t]]
            keys.append(np.array([row.double().numpy() for row in mine]).reshape(-1, D))
        return formula(self.q.double().numpy(), keys, self.sink.double().numpy(), 0.3)


@pytest.mark.parametrize(("pool", "topk_indices"), [(False, False), (True, False), (True, True)])
def test_it_is_its_formula(pool: bool, topk_indices: bool) -> None:
    case = Case()
    assert_close(case.run(pool, topk_indices), case.expected(pool, topk_indices), OP_FLOAT32)


def test_widths_may_be_larger_than_needed() -> None:
    case = Case()
    assert_close(case.run(window_width=40), case.run(), OP_FLOAT32)


def one(rows: torch.Tensor, q: torch.Tensor, sink: torch.Tensor, **changes: Any) -> torch.Tensor:
    """One query over all of `rows` as window."""
    paged = Paged([rows], 4)
    arguments = {"scale": 1.0, "window_width": len(rows), **changes}
    return sparse_attention(q, paged.pages, paged.table, ints([0]), ints([0]), ints([len(rows) - 1]), sink, **arguments)


def test_a_row_without_keys_is_zero() -> None:
    paged = Paged([torch.randn(3, D)], 4)
    out = sparse_attention(
        torch.randn(1, 2, D),
        paged.pages,
        paged.table,
        ints([0]),
        ints([1]),
        ints([0]),
        torch.zeros(2),
        scale=1.0,
        window_width=1,
    )
    assert torch.equal(out, torch.zeros(1, 2, D))


def test_the_sink_only_enlarges_the_denominator() -> None:
    row = torch.randn(1, D)
    q = torch.zeros(1, 1, D)
    assert_close(one(row, q, torch.tensor([0.0]))[0], row / 2, OP_FLOAT32)
    assert_close(one(row, q, torch.tensor([float(np.log(3.0))]))[0], row / 4, OP_FLOAT32)


def test_the_sink_is_neither_scaled_nor_part_of_the_maximum() -> None:
    row = torch.randn(1, D)
    q = row[None] / (row**2).sum()  # logit 1 before the scale
    expected = row * np.exp(0.25) / (np.exp(0.25) + np.exp(2.0))
    assert_close(one(row, q, torch.tensor([2.0]), scale=0.25)[0], expected, OP_FLOAT32)
    # with the sink as the maximum a row of tiny p would lose its digits in bf16
    big = one(row.bfloat16(), q.bfloat16() * 0, torch.tensor([20.0])).float()
    assert (big[0] / row - np.exp(-20.0)).abs().max() < 0.02 * np.exp(-20.0)


def test_huge_logits_do_not_overflow() -> None:
    rows, q = 100 * torch.randn(6, D), 100 * torch.randn(1, 2, D)
    out = one(rows, q, torch.zeros(2))
    best = (q[0] @ rows.T).argmax(dim=1)
    assert_close(out[0], rows[best], OP_FLOAT32)


def test_p_is_rounded_to_bf16_and_its_sum_is_not() -> None:
    """Spec v4 4.5: o = bf16(Σ bf16(p) v / den) with den from fp32 p."""
    rows, q, sink = torch.randn(37, D).bfloat16(), torch.randn(1, 300, D).bfloat16(), torch.randn(300)
    logits = (q[0].double() @ rows.double().T) * 0.2
    top = logits.amax(dim=1, keepdim=True)
    p = (logits - top).exp()
    den = p.sum(dim=1, keepdim=True) + (sink.double()[:, None] - top).exp()
    expected = (p.bfloat16().double() @ rows.double() / den).bfloat16()
    rounded_sum = p.bfloat16().double().sum(dim=1, keepdim=True) + (sink.double()[:, None] - top).exp()
    wrong = [(p @ rows.double() / den).bfloat16(), (p.bfloat16().double() @ rows.double() / rounded_sum).bfloat16()]
    got = one(rows, q, sink, scale=0.2)[0]
    assert (got == expected).float().mean() > 0.995
    assert all((got == other).float().mean() < 0.98 for other in wrong)


def test_a_token_may_be_seen_raw_and_compressed() -> None:
    """Nothing is excluded: equal rows in window and pool count twice."""
    row, q = torch.randn(1, D), torch.zeros(1, 1, D)
    paged = Paged([row], 4)
    arguments: dict[str, Any] = {
        "pool_NBD": paged.pages,
        "pool_table_SP": paged.table,
        "visible_T": ints([1]),
        "pool_width": 1,
    }
    assert_close(one(row, q, torch.zeros(1), **arguments)[0], row * 2 / 3, OP_FLOAT32)
