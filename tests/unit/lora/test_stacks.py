"""Pairs for all experts of a layer: every layout that trainers write is the same adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spyglass.errors import AdapterError
from spyglass.lora.peft import read_adapter
from tests.unit.lora.test_peft import pair, save

LAYER = "model.layers.2.mlp.experts"
EXPERTS, RANK, INNER, OUTER = 3, 2, 5, 8


def factors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in] and B [E, out, r]."""
    torch.manual_seed(seed)
    return torch.randn(EXPERTS, RANK, INNER), torch.randn(EXPERTS, OUTER, RANK)


def laid_out(layout: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if layout == "flat":
        return a.reshape(-1, INNER), b.permute(1, 2, 0).reshape(OUTER, -1)
    return (a, b) if layout == "packed" else (a.transpose(1, 2), b.transpose(1, 2))


@pytest.mark.parametrize("ending", [".weight", ".default.weight", ""])
@pytest.mark.parametrize("second", ["flat", "packed", "exchanged"])
@pytest.mark.parametrize("first", ["flat", "packed", "exchanged"])
def test_d8_every_layout_of_stacked_experts_and_any_mixture_is_the_same_adapter(
    first: str, second: str, ending: str, tmp_path: Path
) -> None:
    tensors = {}
    for number, (stack, layout) in enumerate((("gate_up_proj", first), ("down_proj", second))):
        a, b = laid_out(layout, *factors(number))
        tensors |= {
            f"{LAYER}.{stack}.lora_A{ending}": a.contiguous(),
            f"{LAYER}.{stack}.lora_B{ending}": b.contiguous(),
        }
    found = read_adapter(save(tmp_path / "a", tensors | pair("model.layers.2.self_attn.q_a_proj")))
    assert found.stacked == {"layers.2.ffn.experts": EXPERTS} and len(found.modules) == 3 * EXPERTS + 1
    for expert in range(EXPERTS):
        for matrix, number, rows in (("w1", 0, slice(0, 4)), ("w3", 0, slice(4, 8)), ("w2", 1, slice(0, 8))):
            a, b = factors(number)
            one = found.modules[f"layers.2.ffn.experts.{expert}.{matrix}"]
            assert torch.equal(one.a_RI, a[expert]) and torch.equal(one.b_OR, b[expert][rows]), (matrix, expert)


def test_d8_packed_factors_of_single_matrices_and_a_shared_side_are_read(tmp_path: Path) -> None:
    a, b = factors(0)
    native = "layers.2.ffn.experts"
    tensors = {f"{native}.w1.lora_A.weight": a, f"{native}.w1.lora_B.weight": b}
    tensors |= {f"{LAYER}.up_proj.lora_A.weight": a[0].clone(), f"{LAYER}.up_proj.lora_B.weight": b.clone()}
    found = read_adapter(save(tmp_path / "a", tensors)).modules
    for expert in range(EXPERTS):
        one, other = (found[f"{native}.{expert}.{matrix}"] for matrix in ("w1", "w3"))
        assert torch.equal(one.a_RI, a[expert]) and torch.equal(other.a_RI, a[0]) and torch.equal(other.b_OR, b[expert])


@pytest.mark.parametrize(
    "name", ["blocks.2.attention.q_down", "model.layers.2.self_attn.q_a_projj", "model.layers.2.mlp.experts.gate_down"]
)
def test_d8_a_name_that_is_not_known_is_told_with_what_is_read_and_the_nearest(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        AdapterError, match=r"unmatched: .*read are pairs lora_A \[r, in\].*experts\.gate_up_proj"
    ) as caught:
        read_adapter(save(tmp_path / "a", pair(name)))
    if "self_attn" in name:
        assert "nearest is layers.2.attn." in str(caught.value)
