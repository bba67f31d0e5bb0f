"""The defining router: golden choices, and each of its terms (spec v4 7.1-7.3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.router_topk.reference import router_topk
from tests.tolerance import OP_FLOAT32, ROUTER_WEIGHTS, assert_close

PICTURES_FROM = 129280  # ids of picture roles in the golden file


@pytest.mark.parametrize("name", ["0", "1", "3", "4"])
def test_golden_choices(name: str, golden: Path) -> None:
    with np.load(golden / "ops" / "gate.npz") as found:
        data = {
            key.removeprefix(f"{name}."): torch.from_numpy(found[key]) for key in found if key.startswith(f"{name}.")
        }
    picture = data["ids"] >= PICTURES_FROM
    assert picture.any() and not picture.all()
    forced = None
    if "tid2eid" in data:
        forced = data["tid2eid"][torch.where(picture, 0, data["ids"]).long()]
    ids, weights = router_topk(
        data["x"],
        data["weight"],
        k=data["out_i"].shape[1],
        scale=1.5,
        bias_E=data["bias"],
        bias_image_E=data["bias_vl"],
        is_image_T=picture,
        forced_TK=forced,
    )
    ours, theirs = ids.sort(dim=1), data["out_i"].sort(dim=1)
    assert torch.equal(ours.values.long(), theirs.values.long())
    assert_close(weights.gather(1, ours.indices), data["out_w"].gather(1, theirs.indices), ROUTER_WEIGHTS)


def scores(x: Any, weight: Any) -> np.ndarray:
    return np.sqrt(np.logaddexp(0, x.double().numpy() @ weight.double().numpy().T))


class Rows:
    """Nine rows, seven experts."""

    def __init__(self) -> None:
        self.x, self.weight = torch.randn(9, 13), torch.randn(7, 13)
        self.scores = scores(self.x, self.weight)

    def route(self, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return router_topk(self.x, self.weight, **({"k": 3, "scale": 1.5, "bias_E": None} | changes))


def test_weights_are_unbiased_scores_divided_by_their_sum_times_the_scale() -> None:
    rows = Rows()
    bias = 5 * torch.randn(7)
    ids, weights = rows.route(bias_E=bias)
    chosen = np.take_along_axis(rows.scores, ids.long().numpy(), axis=1)
    assert_close(weights, 1.5 * chosen / chosen.sum(axis=1, keepdims=True), OP_FLOAT32)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32


def test_the_bias_decides_who_is_chosen() -> None:
    rows = Rows()
    bias = torch.zeros(7)
    bias[4] = 100.0
    ids, _ = rows.route(bias_E=bias)
    assert (ids == 4).any(dim=1).all()
    ids, _ = rows.route()
    assert torch.equal(ids.long().sort(dim=1).values, torch.from_numpy(np.sort(np.argsort(-rows.scores)[:, :3])))


def test_a_picture_row_uses_its_own_bias_instead_of_the_other() -> None:
    """By hand: best of score + bias_vl; `bias` neither replaces it nor is added."""
    rows = Rows()
    bias, bias_vl = torch.randn(7), torch.randn(7)
    picture = torch.tensor([True, False] * 4 + [True])
    ids, _ = rows.route(bias_E=bias, bias_image_E=bias_vl, is_image_T=picture)
    for t in range(9):
        used = bias_vl if picture[t] else bias
        best = np.argsort(-(rows.scores[t] + used.numpy()))[:3]
        assert set(ids[t].tolist()) == set(best.tolist())


def test_hash_rows_take_their_table_and_picture_rows_do_not() -> None:
    rows = Rows()
    forced = torch.stack([torch.randperm(7)[:3] for _ in range(9)])
    picture = torch.tensor([False, True] * 4 + [False])
    bias_vl = torch.randn(7)
    ids, weights = rows.route(bias_image_E=bias_vl, is_image_T=picture, forced_TK=forced)
    assert torch.equal(ids[~picture].long(), forced[~picture])
    for t in torch.nonzero(picture).flatten().tolist():
        assert set(ids[t].tolist()) == set(np.argsort(-(rows.scores[t] + bias_vl.numpy()))[:3].tolist())
    chosen = np.take_along_axis(rows.scores, ids.long().numpy(), axis=1)
    assert_close(weights, 1.5 * chosen / chosen.sum(axis=1, keepdims=True), OP_FLOAT32)


def test_ties_go_to_the_lowest_expert() -> None:
    ids, weights = router_topk(torch.zeros(2, 4), torch.randn(6, 4), k=3, scale=1.0, bias_E=None)
    assert ids.sort(dim=1).values.tolist() == [[0, 1, 2]] * 2
    assert_close(weights, np.full((2, 3), 1 / 3), OP_FLOAT32)


def test_scores_of_huge_and_tiny_logits_stay_finite() -> None:
    x, weight = torch.tensor([[100.0, 1.0]]), torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.25, 0.0]])
    ids, weights = router_topk(x, weight, k=2, scale=1.0, bias_E=None)
    assert ids.tolist() == [[0, 2]]
    assert_close(weights, [[10 / 15, 5 / 15]], OP_FLOAT32)


def test_bf16_rows_are_scored_in_full_fp32() -> None:
    """Two experts whose scores differ by less than bf16 can say: fp32 tells them apart."""
    x = torch.ones(1, 64).bfloat16()
    weight = torch.full((2, 64), 0.125)
    weight[1, 0] += 2**-10
    ids, _ = router_topk(x, weight, k=1, scale=1.0, bias_E=None)
    assert ids.tolist() == [[1]]


def test_padding_rows_go_to_no_expert() -> None:
    rows = Rows()
    positions = torch.tensor([0, -1, 2, 3, -1, 5, 6, 7, 8], dtype=torch.int32)
    ids, weights = rows.route(positions_T=positions)
    all_ids, all_weights = rows.route()
    real = positions >= 0
    assert (ids[~real] == -1).all() and (weights[~real] == 0).all()
    assert torch.equal(ids[real], all_ids[real]) and torch.equal(weights[real], all_weights[real])
