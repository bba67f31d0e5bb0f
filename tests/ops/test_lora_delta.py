"""What adapters add: each row by its own adapter, from ranks that lie mixed in one bank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.ops.lora_delta.reference import lora_delta
from tests.tolerance import OP_FLOAT32, assert_close

ADAPTER_R = torch.tensor([2, 2, 7, 2, 7], dtype=torch.int32)
SCALE_R = torch.tensor([0.5, 0.5, -3.0, 0.5, -3.0])


def bank(groups: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 12), torch.randn(5, groups, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_row_gets_the_product_of_its_own_adapter_and_no_other(groups: int, dtype: torch.dtype) -> None:
    a, b = bank(groups)
    x = torch.randn(6, groups, 12).to(dtype)
    adapter_ids = [2, 0, 7, 4, 7, 2]
    expected = np.zeros((6, groups, 8))
    for row, adapter_id in enumerate(adapter_ids):
        for r in range(5):
            if adapter_id == int(ADAPTER_R[r]):
                u = x[row].double().numpy() @ a[r].double().numpy()
                expected[row] += float(SCALE_R[r]) * u[:, None] * b[r].double().numpy()
    out = lora_delta(x, torch.tensor(adapter_ids, dtype=torch.int32), a, b, ADAPTER_R, SCALE_R)
    assert out.dtype == torch.float32
    assert_close(out, expected, OP_FLOAT32)
    assert (out[[1, 3]] == 0).all(), "no adapter, and one that owns nothing here: exactly nothing"


def test_numbers_of_other_adapters_never_leak() -> None:
    a, b = bank()
    a[ADAPTER_R == 7] = float("inf")
    adapter_ids = torch.tensor([2, 0], dtype=torch.int32)
    out = lora_delta(torch.randn(2, 1, 12), adapter_ids, a, b, ADAPTER_R, SCALE_R)
    assert torch.isfinite(out).all() and (out[1] == 0).all()


def test_gradients_reach_input_and_both_factors() -> None:
    a, b = (tensor.double().requires_grad_() for tensor in bank(2))
    x = torch.randn(4, 2, 12, requires_grad=True)
    adapter_ids = torch.tensor([2, 0, 7, 2], dtype=torch.int32)
    gradients = torch.autograd.grad(lora_delta(x, adapter_ids, a, b, ADAPTER_R, SCALE_R).square().sum(), (x, a, b))
    own = (adapter_ids[:, None] == ADAPTER_R).double() * SCALE_R.double()
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, a, b)]
    dense = torch.einsum("tgi,ri,tr,rgo->tgo", wide[0], wide[1], own, wide[2])
    for found, expected in zip(gradients, torch.autograd.grad(dense.square().sum(), wide), strict=True):
        assert_close(found, expected, OP_FLOAT32)
    assert (gradients[0][1] == 0).all()
