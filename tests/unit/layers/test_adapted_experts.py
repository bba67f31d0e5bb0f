"""Which rows go through the fused experts and which expert by expert, and where their addends join."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spyglass.layers.adapted import ExpertsDelta
from spyglass.layers.build import Build
from spyglass.layers.linear import Experts
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, FP4, FakeQuant, Format
from tests.param_parts import expert_params
from tests.tolerance import OP_FLOAT32, assert_close

A8 = FakeQuant(element="e4m3", block=128)
IDS = torch.tensor([[0, 1], [2, 0], [1, 2], [-1, -1], [2, 1]], dtype=torch.int32)


class Odd:
    """Rows of odd slots are adapted; what is added is `size` times a fixed row, and the inputs are kept."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.seen: list[tuple[str, torch.Tensor]] = []

    def adapted(self, slot_T: torch.Tensor) -> torch.Tensor:
        return slot_T % 2 == 1

    def deltas(self) -> ExpertsDelta:
        def delta(matrix: str, expert: int, x_NI: torch.Tensor, slot_N: torch.Tensor) -> torch.Tensor | None:
            self.seen.append((matrix, x_NI))
            out = 64 if matrix == "w2" else 32
            return self.size * torch.linspace(0, 1, out).expand(len(x_NI), out)

        return delta


def experts(format: Format, *, dtype: torch.dtype = torch.float32, stub: float | None = None) -> Experts:
    torch.manual_seed(0)
    ops = bind_ops("cpu", "float32", "reference")
    if stub is not None:
        ops = dataclasses.replace(ops, experts_grouped=lambda x, *args, **options: torch.full(x.shape, stub))
    build = Build(ops=ops, device=torch.device("cpu"), dtype=dtype, params=expert_params("e", 3, 64, 32))
    layer = Experts(build, "e", limit=0.7, rounding=A8)
    for slot in layer.slots():
        slot.put(encode(torch.randn(slot.shape) * 0.3, format))
    return layer


def call(layer: Experts, slots: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    x, weights = torch.randn(5, 64).to(dtype), torch.rand(5, 2)
    return layer(x, IDS, weights, torch.tensor(slots, dtype=torch.int32))


def test_rows_without_adapter_come_from_the_fused_op_and_others_do_not() -> None:
    layer = experts(BF16, stub=7.0)
    layer.adapter = Odd(1.0)
    out = call(layer, [1, 0, 3, 1, 2])
    assert (out[[1, 4]] == 7.0).all() and not (out[[0, 2, 3]] == 7.0).all(dim=1).any()
    assert (call(layer, [0, 2, 0, 2, 0]) == 7.0).all(), "nobody has one: the fused op alone"


@pytest.mark.parametrize("format", [BF16, FP4])
def test_expert_by_expert_without_addends_is_the_fused_sum(format: Format) -> None:
    layer = experts(format)
    fused = call(layer, [1] * 5)
    layer.adapter = Odd(0.0)
    assert_close(call(layer, [1] * 5), fused, OP_FLOAT32)
    assert_close(call(layer, [1, 0, 1, 0, 1]), fused, OP_FLOAT32)


def test_an_addend_sees_the_unrounded_input_and_the_weighted_activation() -> None:
    """w1 and w3 see rows of the layer's input as they came, w2 the activation in the activation dtype."""
    layer = experts(FP4, dtype=torch.bfloat16)
    layer.adapter = adapter = Odd(0.5)
    call(layer, [1] * 5, torch.bfloat16)
    torch.manual_seed(1)
    x = torch.randn(5, 64).bfloat16()
    assert [matrix for matrix, _ in adapter.seen] == ["w1", "w3", "w2"] * 3
    for expert, (matrix, seen) in enumerate(adapter.seen[::3]):
        assert matrix == "w1" and torch.equal(seen, x[(IDS == expert).any(dim=1)])
    activations = torch.cat([seen for matrix, seen in adapter.seen if matrix == "w2"])
    assert activations.dtype == torch.bfloat16
    assert activations.abs().max() <= 0.7 * 0.7 + 1e-2, "clamped, and weighted by less than 1"
