"""The defining index op: golden scores and top-k indices, float64 formula, ties, masks (spec v4 5.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.hadamard.reference import hadamard
from spyglass.ops.index_topk.reference import index_scores, index_topk
from spyglass.quant.formats import FakeQuant
from tests.ops.paged import Paged
from tests.tolerance import INDEX_SCORES, OP_FLOAT32, assert_close

FP4 = FakeQuant(element="e2m1", block=32)


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prepared(x: torch.Tensor, which: str) -> torch.Tensor:
    """As the released code holds index rows: bf16 into and out of the rotation and the rounding."""
    x = x.bfloat16()
    if which == "v4":
        x = hadamard(x)
    return (x if which == "plain" else fake_quant(x, FP4)).float()


@pytest.mark.parametrize("which", ["v4", "v41", "plain"])
def test_golden_scores_and_indices(which: str, golden: Path) -> None:
    with np.load(golden / "ops" / "index.npz") as found:
        data = {key: torch.from_numpy(found[key]) for key in found}
    keys = Paged([prepared(data["k"], which)], 7)
    q, count = prepared(data["q"], which), len(data["q"])
    arguments = q, data["w"], keys.pages, keys.table, ints([0] * count), ints([300] * count)
    scores = index_scores(*arguments, max_visible=300, stepwise=False)
    assert_close(scores, data[f"scores_{which}"], INDEX_SCORES)
    topk_indices = index_topk(*arguments, k=64, max_visible=300, stepwise=False)
    assert torch.equal(topk_indices.long(), data[f"top64_{which}"].sort(dim=1).values)


def test_hadamard_and_fp4_change_the_golden_indices(golden: Path) -> None:
    with np.load(golden / "ops" / "index.npz") as found:
        v4, plain = found["top64_v4"], found["top64_plain"]
    missing = [len(set(a) - set(b)) for a, b in zip(v4.tolist(), plain.tolist(), strict=True)]
    assert 3 < np.mean(missing) < 12


def case(tokens: int = 40, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    random = np.random.default_rng(2)
    rows = [torch.randn(n, 8).to(dtype) for n in (23, 6)]
    seq = random.integers(0, 2, tokens)
    visible = random.integers(0, np.array([23, 6])[seq] + 1)
    q, w = torch.randn(tokens, 3, 8).to(dtype), torch.randn(tokens, 3).to(dtype)
    return rows, Paged(rows, 5), seq, visible, q, w


def test_scores_are_their_formula_and_invisible_entries_minus_infinity() -> None:
    rows, keys, seq, visible, q, w = case()
    got = index_scores(q, w, keys.pages, keys.table, ints(seq), ints(visible), max_visible=23, stepwise=False)
    for t, s in enumerate(seq):
        dots = np.maximum(q[t].double().numpy() @ rows[s].double().numpy().T, 0)
        expected = np.full(23, -np.inf)
        expected[: visible[t]] = (w[t].double().numpy() @ dots)[: visible[t]]
        assert_close(got[t], expected, OP_FLOAT32)


def test_topk_indices_are_the_best_visible_entries_in_order() -> None:
    rows, keys, seq, visible, q, w = case()
    topk_indices = index_topk(
        q, w, keys.pages, keys.table, ints(seq), ints(visible), k=4, max_visible=23, stepwise=False
    )
    assert topk_indices.dtype == torch.int32 and topk_indices.shape == (40, 4)
    for t, s in enumerate(seq):
        dots = np.maximum(q[t].double().numpy() @ rows[s].double().numpy().T, 0)
        scores = (w[t].double().numpy() @ dots)[: visible[t]]
        best = sorted(np.argsort(-scores, kind="stable")[:4].tolist())
        assert [p for p in topk_indices[t].tolist() if p >= 0] == best
        assert (
            sorted(topk_indices[t].tolist(), key=lambda p: (p < 0, p)) == topk_indices[t].tolist()
            or -1 in topk_indices[t].tolist()
        )


def test_fewer_visible_entries_than_k_leave_minus_one() -> None:
    _, keys, seq, _, q, w = case(3)
    topk_indices = index_topk(
        q, w, keys.pages, keys.table, ints(seq), ints([0, 2, 6]), k=5, max_visible=6, stepwise=False
    )
    assert [(row >= 0).sum().item() for row in topk_indices] == [0, 2, 5]


def test_no_more_indices_than_entries_are_returned() -> None:
    _, keys, seq, visible, q, w = case(3)
    topk_indices = index_topk(
        q, w, keys.pages, keys.table, ints(seq), ints(visible), k=50, max_visible=23, stepwise=False
    )
    assert topk_indices.shape == (3, 23)


def test_ties_go_to_the_lowest_entry() -> None:
    keys = Paged([torch.ones(9, 8)], 4)
    q, w = torch.ones(1, 3, 8), torch.ones(1, 3)
    topk_indices = index_topk(q, w, keys.pages, keys.table, ints([0]), ints([9]), k=3, max_visible=9, stepwise=False)
    assert topk_indices.tolist() == [[0, 1, 2]]


def test_weights_are_scaled_in_their_own_dtype() -> None:
    """-1 turns the order around; in bf16 the product of a weight and the scale is rounded."""
    keys = Paged([torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0]])], 4)
    q, w = torch.tensor([[[1.0, 0.0]]]), torch.ones(1, 1)
    options = {"k": 1, "max_visible": 3, "stepwise": False}
    rows = keys.pages, keys.table, ints([0]), ints([3])
    assert index_topk(q, w, *rows, **options).tolist() == [[0]]
    assert index_topk(q, w, *rows, weight_scale=-1.0, **options).tolist() == [[1]]
    narrow = torch.ones(1, 1).bfloat16()  # 2 ** -200 is 0 there, and all entries are equal
    assert index_topk(q, narrow, *rows, weight_scale=-(2.0**-200), **options).tolist() == [[0]]


def test_negative_dots_count_nothing_and_weights_may_be_negative() -> None:
    keys = Paged([torch.tensor([[1.0, 0.0], [-1.0, 0.0]])], 4)
    q, w = torch.tensor([[[1.0, 0.0], [-2.0, 0.0]]]), torch.tensor([[1.0, -0.5]])
    scores = index_scores(q, w, keys.pages, keys.table, ints([0]), ints([2]), max_visible=2, stepwise=False)
    assert scores.tolist() == [[1.0, -1.0]]


def test_stepwise_rounds_dots_products_and_sum() -> None:
    """Spec v4 5.5: dot products, weighted products and the result are bf16 tensors."""
    rows, keys, _, _, q, w = case(30, torch.bfloat16)
    seq, visible = ints([0] * 30), ints([23] * 30)
    dots = (q.double() @ rows[0].double().T).bfloat16().clamp(min=0)
    expected = (dots.double() * w.double()[:, :, None]).bfloat16().double().sum(dim=1).bfloat16().float()
    got = index_scores(q, w, keys.pages, keys.table, seq, visible, max_visible=23, stepwise=True)
    assert (got == expected).float().mean() > 0.99
    smooth = index_scores(q, w, keys.pages, keys.table, seq, visible, max_visible=23, stepwise=False)
    assert (got != smooth).float().mean() > 0.5


def test_blocks_of_queries_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    _, keys, seq, visible, q, w = case()
    arguments = q, w, keys.pages, keys.table, ints(seq), ints(visible)
    whole = index_topk(*arguments, k=4, max_visible=23, stepwise=False)
    monkeypatch.setattr("spyglass.ops.index_topk.reference.SCORES_AT_ONCE", 3 * 23 * 3)
    assert torch.equal(index_topk(*arguments, k=4, max_visible=23, stepwise=False), whole)
