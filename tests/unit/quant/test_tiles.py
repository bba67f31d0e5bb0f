"""Tiled FP4 weights are the same weights in another order."""

from __future__ import annotations

import pytest
import torch

from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, FP4
from spyglass.quant.packed import Packed
from spyglass.quant.tiles import can_tile, tile, untile


def all_bytes(*shape: int) -> Packed:
    """Every byte occurs as a pair of codes and every byte but NaN as a scale."""
    data = (torch.arange(shape[0] * shape[1] * shape[2] // 2) * 37 % 256).to(torch.uint8)
    scale = (torch.arange(shape[0] * shape[1] * shape[2] // 32) * 11 % 255).to(torch.uint8)
    return Packed(FP4, data.view(*shape[:-1], -1), scale.view(*shape[:-1], -1), shape)


def test_tiling_is_undone_without_loss() -> None:
    weight = all_bytes(2, 32, 1024)
    tiled = tile(weight)
    assert tiled.tiled and not torch.equal(tiled.data, weight.data)
    back = untile(tiled)
    assert weight.scale is not None and back.scale is not None and not back.tiled
    assert torch.equal(back.data, weight.data) and torch.equal(back.scale, weight.scale)


def test_a_tiled_weight_decodes_to_the_same_numbers() -> None:
    weight = encode(torch.randn(2, 48, 512), FP4)
    assert torch.equal(decode(tile(weight)), decode(weight))
    assert torch.equal(decode(tile(weight)[1]), decode(weight[1]))
    assert torch.equal(tile(weight)[1].data, tile(weight[1]).data)


@pytest.mark.parametrize("shape", [(24, 512), (16, 256)])
def test_odd_shapes_are_not_tiled(shape: tuple[int, int]) -> None:
    assert not can_tile(encode(torch.randn(shape), FP4))
    assert not can_tile(encode(torch.randn(16, 512), BF16))
