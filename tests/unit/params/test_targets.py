"""Groups by whole native names: what looks alike at its end is told apart, what takes no adapter has no group."""

from __future__ import annotations

import pytest

from spyglass.params.targets import count_groups, group_of, why_refused

GROUP_OF = {
    "layers.3.attn.wq_a": "attention",
    "layers.3.attn.wq_b": "attention",
    "layers.12.attn.wo_a": "attention",
    "layers.3.attn.wkv": "attention",
    "layers.3.attn.compressor.wkv": "compressor",
    "layers.3.attn.compressor.wgate": "compressor",
    "layers.3.attn.indexer.wq_b": "indexer",
    "layers.3.attn.indexer.wk": "indexer",
    "layers.3.attn.indexer.weights_proj": "indexer",
    "layers.3.attn.indexer.compressor.wkv": "indexer",
    "layers.3.attn.indexer.compressor.wgate": "indexer",
    "layers.3.ffn.shared_experts.w2": "shared",
    "layers.3.ffn.experts.255.w1": "experts",
    "layers.1.engram.wkv": "engram",
    "vision.patch_embed.proj": "tower",
    "vision.blocks.23.attn.wqkv": "tower",
    "vision.blocks.0.mlp.w1": "tower",
    "aligner.w1": "aligner",
}
NO_GROUP = [
    "layers.3.attn.wq",
    "layers.3.attn.indexer.wq_a",
    "layers.3.attn.compressor.wq_b",
    "layers.3.wq_b",
    "attn.wq_b",
    "model.layers.3.attn.wq_b",
    "layers.3.attn.wq_b.weight",
    "layers.3.ffn.experts.w1",
    "layers.3.ffn.gate",
    "layers.3.engram.embed",
    "layers.3.attn.q_norm",
    "vision.blocks.0.norm1",
    "aligner.w3",
    "head",
    "embed",
    "mtp.0.attn.wq_b",
]


@pytest.mark.parametrize("name", GROUP_OF)
def test_a_module_belongs_to_one_group(name: str) -> None:
    assert group_of(name) == GROUP_OF[name] and why_refused(name) is None


@pytest.mark.parametrize("name", NO_GROUP)
def test_everything_else_belongs_to_none(name: str) -> None:
    assert group_of(name) is None


def test_counts_are_in_order_and_leave_out_what_is_not_there() -> None:
    assert list(count_groups(reversed(GROUP_OF)).items()) == [
        ("attention", 4),
        ("compressor", 2),
        ("indexer", 5),
        ("shared", 1),
        ("experts", 1),
        ("engram", 1),
        ("tower", 3),
        ("aligner", 1),
    ]
    assert count_groups(["head"]) == {}
