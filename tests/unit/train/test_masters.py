"""Master weights are what the packed file will say, and the bias of an expert moves towards even use."""

from __future__ import annotations

import pytest
import torch

from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, Format, fp8
from spyglass.train.balance import BIASES, balance
from spyglass.train.masters import stored_values
from tests.small_models import small_config


@pytest.mark.parametrize("format", [fp8((128, 128)), fp8((32, 32)), fp8((128, 128), "F32"), FP4, BF16, F32], ids=str)
def test_stored_values_are_those_of_the_packed_file(format: Format) -> None:
    source = torch.Generator().manual_seed(5)
    for shape in ((3, 200, 96), (2, 2, 40, 320)):
        values = (
            torch.randn(shape, generator=source) * torch.exp(3 * torch.randn(shape[:-1], generator=source))[..., None]
        )
        values[..., 1, :32] = 0.0
        values[..., 2, :32] = torch.tensor([6.0, 1.5, 448.0, 1.75]).repeat(8)
        expected = torch.stack([decode(encode(matrix, format), torch.float32) for matrix in values.flatten(0, -3)])
        assert torch.equal(stored_values(values, format).flatten(0, -3), expected)


def test_a_bias_moves_by_the_rate_towards_even_use_by_its_own_kind_of_rows() -> None:
    """Expert 0 has too many text rows, expert 1 too few images; by how many does not matter."""
    text = small_config().text
    layers, experts = text.num_hidden_layers, text.n_routed_experts
    biases = {f"layers.{layer}{name}": torch.zeros(experts) for layer in range(layers) for name in BIASES}
    load_2E = torch.tensor([4.0, 100.0])[:, None].repeat(1, experts)
    load_2E[0, 0], load_2E[1, 1] = 9, 40
    balance(biases, [load_2E] * (layers - 1) + [torch.full((2, experts), 3.0)], text, 0.25)
    expected = torch.full((2, experts), 0.25)
    expected[0, 0], expected[1] = -0.25, -0.25
    expected[1, 1] = 0.25
    for layer in range(layers):
        moved = torch.stack([biases[f"layers.{layer}{name}"] for name in BIASES])
        assert torch.equal(moved, expected if layer < layers - 1 else torch.zeros(2, experts)), layer
