"""The parts of all processes, put together, are the whole: in numbers and in stored bytes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
import torch

from spyglass.checkpoint.random import random_tensor
from spyglass.config.presets import Preset, preset_config
from spyglass.config.read import parse_model_config
from spyglass.errors import ConfigError
from spyglass.params.shard import Cut, Shard, require_even
from spyglass.params.table import Param, param_table
from spyglass.quant.codec import decode
from spyglass.quant.formats import BF16, F32, FP4, fp8
from spyglass.quant.packed import Packed
from tests.param_parts import param

SIZES = (1, 2, 3, 4, 8)
PRESETS: tuple[Preset, ...] = ("tiny", "tiny-v41")
RELEASED: tuple[Preset, ...] = ("flash-vision", "v41-flash")


@cache
def table(preset: Preset) -> dict[str, Param]:
    return param_table(parse_model_config(preset_config(preset, packed=True), preset))


def ranks(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


def taken(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    return tensor if cut is None else tensor.narrow(cut.axis, cut.start, cut.stop - cut.start)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_parts_of_all_ranks_are_the_whole(preset: Preset, size: int) -> None:
    for name, one in table(preset).items():
        if one.split not in ("rows", "columns") or one.kind == "table":
            continue
        whole = random_tensor(name, one, seed=0)
        plain = Packed(BF16, decode(whole, torch.bfloat16), None, one.shape)
        parts = [taken(plain.data, next(shard.stored_cuts(name, one, BF16))) for shard in ranks(size)]
        assert torch.equal(torch.cat(parts, dim=0 if one.split == "rows" else 1), plain.data), name


@pytest.mark.parametrize("size", (2, 4, 8))
@pytest.mark.parametrize("preset", RELEASED)
def test_released_models_are_cut_between_scale_blocks(preset: Preset, size: int) -> None:
    require_even(table(preset), size)
    for name, one in table(preset).items():
        stored = [shard.stored_cuts(name, one, one.format) for shard in ranks(size)]
        for tensor, cuts in enumerate(zip(*stored, strict=True)):
            if cuts[0] is None:
                assert cuts == (None,) * size
                continue
            shape = one.format.scale_shape(one.shape) if tensor else one.format.storage_shape(one.shape)
            assert shape is not None and cuts[0].start == 0 and cuts[-1].stop == shape[cuts[0].axis], name
            assert all(left.stop == right.start for left, right in pairwise(cuts)), name
            held = [cut.stop - cut.start for cut in cuts]
            assert max(held) - min(held) <= (one.kind == "table"), f"{name}: every process has as much"


@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("format", [fp8((128, 128)), fp8((32, 32)), FP4], ids=str)
def test_a_stored_part_means_what_the_whole_means_there(format: object, axis: str) -> None:
    """Weight and scale cut by their own places, decoded: the same numbers as cutting the decoded whole."""
    one = Param(shape=(512, 384), kind="matrix", component="text", format=format, split=axis, unit=128)
    whole = random_tensor("w", one, seed=0)
    assert whole.scale is not None
    dense = decode(whole, torch.float32)
    for shard in ranks(3):
        weight, scale = shard.stored_cuts("w", one, format)
        data, scales, cut = taken(whole.data, weight), taken(whole.scale, scale), shard.cut(one)
        shape = tuple(taken(dense, cut).shape)
        assert torch.equal(decode(Packed(format, data, scales, shape), torch.float32), taken(dense, cut))


@pytest.mark.parametrize("preset", PRESETS + RELEASED)
def test_what_one_head_needs_is_cut_alike(preset: Preset) -> None:
    """Queries, sinks and both output maps of an output group are on one process; so are w1, w3 and w2."""
    params = table(preset)
    for names in (("attn.wq_b", "attn.attn_sink", "attn.wo_a", "attn.wo_b"),
                  ("ffn.shared_experts.w1", "ffn.shared_experts.w2", "ffn.shared_experts.w3")):  # fmt: skip
        found = [params[f"layers.1.{name}"].num_units for name in names if f"layers.1.{name}" in params]
        assert len(set(found)) <= 1


def test_experts_are_divided_whole() -> None:
    expert = table("tiny")["layers.0.ffn.experts.3.w1"]
    spans = [shard.span(expert.num_units) for shard in ranks(3)]
    assert spans == [(0, 2), (2, 5), (5, 8)]
    assert list(ranks(3)[0].stored_cuts("w1", expert, FP4)) == [None, None]


def test_a_cut_through_a_scale_block_is_refused() -> None:
    one = param(96, 64, split="rows", unit=48)
    assert [shard.cut(one) for shard in ranks(2)] == [Cut(0, 0, 48), Cut(0, 48, 96)]
    assert list(ranks(2)[0].stored_cuts("w", one, F32)) == [Cut(0, 0, 48)]
    with pytest.raises(ConfigError, match="48 rows do not end on scale blocks of 32"):
        list(ranks(2)[0].stored_cuts("w", one, fp8((32, 32))))
