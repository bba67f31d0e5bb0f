"""Rows that wait for their group: values, then gates with the bias of their place (spec v4 5.1)."""

from __future__ import annotations

import torch

from spyglass.ops.compress_rows.reference import compress_rows


def test_values_come_first_and_each_gate_has_the_bias_of_its_place() -> None:
    kv, gate = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    ape = torch.tensor([[0.1, 0.2], [0.5, 0.25], [7.0, 7.0]])
    got = compress_rows(kv, gate, ape, torch.tensor([1, 0]))
    assert torch.equal(got, torch.tensor([[1.0, 2.0, 10.5, 20.25], [3.0, 4.0, 30.1, 40.2]]))
    assert torch.equal(compress_rows(kv, gate, None, torch.tensor([1, 0])), torch.cat([kv, gate], dim=1))
