"""Routed and shared experts are summed before anything is rounded (spec v4 7.4)."""

from __future__ import annotations

import torch

from spyglass.ops.add_shared.reference import add_shared


def test_the_sum_is_rounded_once() -> None:
    routed, shared = torch.tensor([[1.0 + 2**-8, 3.0]]), torch.tensor([[2**-8, 0.5]]).bfloat16()
    assert torch.equal(add_shared(routed, shared), torch.tensor([[1.0 + 2**-7, 3.5]]).bfloat16())
    assert add_shared(routed, shared.float()).dtype == torch.float32
