"""What the layers add to the ops: where weights go, when inputs are rounded, how adapters join, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spyglass.errors import CheckpointError, DeviceError
from spyglass.layers.build import BuildContext, weight_slots
from spyglass.layers.embedding import Embedding, PlainTensor
from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.layers.norm import RMSNorm
from spyglass.ops.build import isas, why_not
from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.native import PAIR_ISAS
from spyglass.ops.table import bind_ops
from spyglass.params.table import Param
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, I64, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed
from tests.param_parts import expert_params, param
from tests.tolerance import OP_FLOAT32, assert_close

A8 = FakeQuant(element="e4m3", block=128)


def build(dtype: torch.dtype = torch.float32, expand: bool = False, **params: Param) -> BuildContext:
    """`params` by name; a 32 x 64 matrix `w` is always there."""
    ops = bind_ops("cpu", str(dtype).removeprefix("torch."), "reference")
    table = {"w": param(32, 64), **params}
    return BuildContext(ops=ops, device=torch.device("cpu"), dtype=dtype, expand=expand, params=table)


def linear(format: Format, *, expand: bool = False, dtype: torch.dtype = torch.float32, bias: bool = False) -> Linear:
    biases = {"w.bias": param(32, kind="vector")} if bias else {}
    layer = Linear(build(dtype, expand, **biases), "w", rounding=A8)
    layer.slots()[0].put(encode(torch.randn(32, 64), format))
    if bias:
        layer.slots()[1].put(encode(torch.randn(32), F32))
    return layer


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("format", [fp8((128, 128)), FP4])
def test_the_input_of_a_packed_weight_is_rounded_expanded_or_not(format: Format, expand: bool) -> None:
    layer, x = linear(format, expand=expand), torch.randn(5, 64)
    assert layer.weight is not None
    expected = fake_quant(x, A8) @ decode(layer.weight, torch.float32).mT
    assert_close(layer(x), expected, OP_FLOAT32)


@pytest.mark.skipif(isas()[0] not in PAIR_ISAS, reason="this processor multiplies no bf16 pairs")
@pytest.mark.parametrize("byte", [0, 9, 10, 127, 246, 247])
@pytest.mark.parametrize("format", [fp8((128, 128)), FP4])
def test_a_scale_that_the_bf16_kernels_cannot_hold_is_refused_where_it_would_matter(format: Format, byte: int) -> None:
    """Every weight is multiplied as it is, or refused by name; zeros are zeros under any scale."""
    if why_not() is not None:
        pytest.skip(str(why_not()))
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    ones, zeros = encode(torch.ones(32, 64), format), encode(torch.zeros(32, 64), format)
    fast = dataclasses.replace(build(torch.bfloat16), ops=bind_ops("cpu", "bfloat16"))
    assert ones.scale is not None and zeros.scale is not None
    ones = dataclasses.replace(ones, scale=torch.full_like(ones.scale, byte))
    zeros = dataclasses.replace(zeros, scale=torch.full_like(zeros.scale, byte))
    layer, plain = (Linear(each, "w", fp32_out=True) for each in (fast, build(torch.bfloat16)))
    layer.slots()[0].put(zeros)
    assert (layer(x) == 0).all()
    if not 10 <= byte <= 246:
        with pytest.raises(DeviceError, match=r"^w has scales outside"):
            layer.slots()[0].put(ones)
        return
    layer.slots()[0].put(ones)
    plain.slots()[0].put(ones)
    assert_close(layer(x), plain(x), OP_FLOAT32)


@pytest.mark.parametrize("format", [BF16, F32])
def test_the_input_of_a_plain_weight_is_not_rounded(format: Format) -> None:
    layer, x = linear(format), torch.randn(5, 64)
    assert layer.weight is not None
    assert_close(layer(x), x @ layer.weight.data.float().mT, OP_FLOAT32)


def test_expanding_decodes_to_the_activation_dtype_and_never_loses_digits() -> None:
    packed = encode(torch.randn(32, 64), FP4)
    for dtype, format in ((torch.bfloat16, BF16), (torch.float32, F32)):
        held = build(dtype, expand=True).hold("w", packed)
        assert held.format == format and held.data.dtype == dtype
        assert torch.equal(held.data.float(), decode(packed, torch.float32))
    wide = encode(torch.randn(32, 64), F32)
    assert build(torch.bfloat16, expand=True).hold("w", wide).format == F32
    assert build(torch.bfloat16).hold("w", packed).format == FP4


def test_a_bias_is_its_own_tensor_and_is_added() -> None:
    layer, x = linear(BF16, bias=True), torch.randn(5, 64)
    assert [slot.name for slot in layer.slots()] == ["w", "w.bias"]
    assert layer.weight is not None and layer.bias_O is not None
    assert_close(layer(x), x @ layer.weight.data.float().mT + layer.bias_O, OP_FLOAT32)


def test_a_linear_may_leave_in_fp32() -> None:
    layer = Linear(build(torch.bfloat16), "w", fp32_out=True)
    layer.slots()[0].put(encode(torch.randn(32, 64), BF16))
    assert layer(torch.randn(3, 64).bfloat16()).dtype == torch.float32


class Adds:
    """An adapter that remembers its input and gives a fixed addend."""

    def __init__(self, addend: torch.Tensor) -> None:
        self.addend = addend
        self.seen: list[torch.Tensor] = []

    def __call__(self, x_TI: torch.Tensor, adapter_T: torch.Tensor) -> torch.Tensor:
        self.seen.append(x_TI)
        return self.addend * (adapter_T != 0).view(-1, *(1,) * (self.addend.dim() - 1))


def test_an_adapter_joins_from_the_unrounded_input_before_the_one_rounding() -> None:
    layer, x = linear(fp8((128, 128)), dtype=torch.bfloat16), torch.randn(5, 64).bfloat16()
    plain = layer(x)
    layer.adapter = adapter = Adds(torch.randn(5, 32))
    adapters = torch.tensor([0, 1, 0, 2, 1], dtype=torch.int32)
    out = layer(x, adapters)
    assert torch.equal(adapter.seen[0], x)
    assert torch.equal(out[[0, 2]], plain[[0, 2]]), "rows of adapter 0 are bit-equal to no adapter"
    assert layer.weight is not None
    exact = fake_quant(x, A8).double() @ decode(layer.weight, torch.float32).double().mT
    expected = (exact + adapter.addend.double()).bfloat16()
    assert (out[[1, 3, 4]] == expected[[1, 3, 4]]).float().mean() > 0.98


def test_without_ids_an_adapter_is_not_asked() -> None:
    layer, x = linear(BF16), torch.randn(5, 64)
    plain = layer(x)
    layer.adapter = adapter = Adds(torch.randn(5, 32))
    assert torch.equal(layer(x), plain) and not adapter.seen


def test_a_grouped_linear_takes_adapters_and_never_rounds() -> None:
    layer = GroupedLinear(build(wo_a=param(24, 64, groups=3)), "wo_a")
    (slot,) = layer.slots()
    assert slot.shape == (24, 64)
    slot.put(encode(torch.randn(24, 64), fp8((128, 128))))
    x = torch.randn(5, 3, 64)
    assert layer.weight is not None
    wide = decode(layer.weight, torch.float32).view(3, 8, 64)
    assert_close(layer(x), torch.einsum("tgi,goi->tgo", x, wide), OP_FLOAT32)
    layer.adapter = Adds(torch.randn(5, 3, 8))
    adapters = torch.ones(5, dtype=torch.int32)
    assert_close(layer(x, adapters), torch.einsum("tgi,goi->tgo", x, wide) + layer.adapter.addend, OP_FLOAT32)


def experts(expand: bool = False) -> Experts:
    name = "layers.0.ffn.experts"
    return Experts(build(expand=expand, **expert_params(name, 3, 64, 32)), name, limit=1.0, rounding=A8)


@pytest.mark.parametrize("expand", [False, True])
def test_experts_are_stacked_in_order_whatever_order_they_come_in(expand: bool) -> None:
    layer = experts(expand)
    weights = {slot.name: encode(torch.randn(*slot.shape), FP4) for slot in layer.slots()}
    assert list(weights)[:3] == [f"layers.0.ffn.experts.0.{name}" for name in ("w1", "w3", "w2")]
    for slot in reversed(layer.slots()):
        slot.put(weights[slot.name])
    for name, stack in layer.stacks.items():
        for expert in range(3):
            expected = decode(weights[f"layers.0.ffn.experts.{expert}.{name}"], torch.float32)
            assert torch.equal(decode(stack[expert], torch.float32), expected)


def test_experts_of_two_formats_are_refused_by_name() -> None:
    layer = experts()
    first, second, *_ = layer.slots()
    first.put(encode(torch.randn(*first.shape), FP4))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w3 is stored as bf16 but .*experts\.0\.w1 as fp4"):
        second.put(encode(torch.randn(*second.shape), BF16))


def test_expert_inputs_are_rounded_only_for_packed_experts() -> None:
    x, ids, shares = torch.randn(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    outs = {}
    for format in (F32, fp8((128, 128))):
        torch.manual_seed(1)
        layer = experts()
        for slot in layer.slots():
            values = decode(encode(torch.randn(*slot.shape), fp8((128, 128))), torch.float32)
            slot.put(encode(values, format))
        outs[format.name] = layer(x, ids, shares)
    assert (outs["f32"] - outs["fp8"]).abs().max() > 1e-3


def test_embedding_rows_of_absent_ids_are_safe() -> None:
    layer = Embedding(build(torch.bfloat16, embed=param(5, 8)), "embed")
    table = encode(torch.randn(5, 8), BF16)
    layer.slots()[0].put(table)
    out = layer(torch.tensor([4, -1, 2], dtype=torch.int32))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, table.data[[4, 0, 2]])


def test_a_packed_embedding_is_decoded() -> None:
    layer = Embedding(build(embed=param(5, 64)), "embed")
    table = encode(torch.randn(5, 64), fp8((128, 128)))
    layer.slots()[0].put(table)
    assert torch.equal(layer(torch.tensor([3])), decode(table, torch.float32)[[3]])


def test_a_table_that_points_nowhere_is_refused_by_name() -> None:
    table = {"gate.tid2eid": param(2, 2, kind="index", num_experts=4)}
    holder = PlainTensor(build(**table), "gate.tid2eid", torch.int32)
    for bad in (4, -1):
        with pytest.raises(CheckpointError, match=rf"gate\.tid2eid holds {bad}.*0\.\.3"):
            holder.slots()[0].put(Packed(I64, torch.tensor([[0, 1], [3, bad]]), None, (2, 2)))
    holder.slots()[0].put(Packed(I64, torch.tensor([[0, 1], [3, 2]]), None, (2, 2)))
    assert holder.tensor().tolist() == [[0, 1], [3, 2]]


def test_norms_keep_their_weight_in_fp32_and_their_own_eps() -> None:
    layer = RMSNorm(build(torch.bfloat16, **{"norm.weight": param(8, kind="vector")}), "norm", 0.5)
    assert layer.slots()[0].name == "norm.weight"
    layer.slots()[0].put(encode(torch.randn(8), BF16))
    assert layer.weight_D is not None and layer.weight_D.dtype == torch.float32
    x = torch.randn(3, 8)
    expected = layer.weight_D * x / (x.square().mean(dim=-1, keepdim=True) + 0.5).sqrt()
    assert_close(layer(x), expected, OP_FLOAT32)


def test_slots_are_found_below_any_module() -> None:
    norm = RMSNorm(build(**{"n.weight": param(4, kind="vector")}), "n", 1e-6)
    tree = torch.nn.ModuleDict({"a": linear(BF16), "b": torch.nn.ModuleList([norm])})
    assert [slot.name for slot in weight_slots(tree)] == ["w", "n.weight"]
