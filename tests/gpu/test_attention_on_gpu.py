"""Attention and the index choice at their released sizes, which launch what small cases do not, equal the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass.ops.index_topk.reference import index_topk
from spyglass.ops.sparse_attention.reference import sparse_attention
from spyglass.ops.table import bind_ops
from tests.ops import paged_cases as cases
from tests.ops.call import Source, assert_agrees, poisoned, run_call
from tests.tolerance import OP_BFLOAT16

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pool", ["none", "all", "chosen", "first"])
@pytest.mark.parametrize("rows", [1, 5, 33, 140, 300])
def test_attention_of_64_heads_of_512_channels(rows: int, pool: str) -> None:
    options: dict[str, Any] = {"heads": 64, "dim": 512, "window": 128, "slack": 3, "turned": rows != 33}
    topk = pool if pool in ("chosen", "first") else ""
    call = cases.sparse_attention(Source(torch.bfloat16, rows), pool=pool != "none", topk=topk, **options)
    expected = run_call(sparse_attention, call, "cuda")
    results = run_call(bind_ops("cuda", "bfloat16").sparse_attention, call, "cuda", poisoned)
    assert_agrees(call, results, tuple(result.cpu() for result in expected), OP_BFLOAT16, f"{rows} rows")


@pytest.mark.parametrize("entries", [700, 1025, 5000, 40_000])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [512, 2048])
def test_the_choice_of_many_entries(entries: int, ties: bool, k: int) -> None:
    """Integers, so that no order of a sum can turn a choice; with ties most entries score the same."""
    generator = torch.Generator().manual_seed(entries)
    most = 2 if ties else 9
    q, keys = (
        torch.randint(-most, most, shape, generator=generator).bfloat16().cuda()
        for shape in ((5, 64, 128), (entries // 64 + 1, 64, 128))
    )
    weights = torch.zeros(5, 64, dtype=torch.bfloat16)
    weights[:, :2] = torch.tensor([1.0, 0.5])
    table = torch.randperm(len(keys), generator=generator).int().cuda().expand(5, -1).contiguous()
    visible = torch.tensor([entries, entries - 1, min(entries, k + 1), 0, entries // 2]).int().cuda()
    rows = (q, weights.cuda(), keys, table, torch.arange(5, dtype=torch.int32, device="cuda"), visible)
    options: dict[str, Any] = {"k": k, "max_visible": entries, "stepwise": True}
    assert torch.equal(bind_ops("cuda", "bfloat16").index_topk(*rows, **options), index_topk(*rows, **options))
