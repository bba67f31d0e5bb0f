"""What users of adapters need comes from `spyglass` itself."""

from __future__ import annotations

from pathlib import Path

import torch

import spyglass
from spyglass import LLM, SamplingParams
from spyglass.config.shipped import SHIPPED


def test_an_adapter_is_made_saved_served_and_merged_through_the_front_door(tmp_path: Path) -> None:
    """Served beside the weights or merged into them (in float arithmetic of bf16), it changes the same answer."""
    assert set(spyglass.__all__) <= set(dir(spyglass)) and all(getattr(spyglass, name) for name in spyglass.__all__)
    llm = LLM("spyglass-tiny-v4")
    params = SamplingParams(max_tokens=4, temperature=0.0)
    (before,) = llm.generate([[0, 5, 6]], params)
    adapter = llm.new_adapter(["attention", "experts"], rank=2, alpha=4)
    assert sum(adapter.counts.values()) > 0
    (same,) = llm.generate([[0, 5, 6]], params)
    assert same.token_ids == before.token_ids, "a fresh adapter adds nothing"
    with torch.no_grad():
        for leaf in adapter.parameters.values():
            leaf.normal_(std=0.3)
    adapter.save(tmp_path / "mine")
    adapter.detach()
    llm.add_adapter("mine", tmp_path / "mine")
    base, mine = llm.generate([[0, 5, 6]] * 2, params, adapter=[None, "mine"])
    assert base.token_ids == before.token_ids != mine.token_ids
    report = spyglass.merge_adapter(SHIPPED / "spyglass-tiny-v4", tmp_path / "mine", tmp_path / "merged")
    assert report.groups["attention"].modules == adapter.counts["attention"]
    (merged,) = LLM(tmp_path / "merged").generate([[0, 5, 6]], params)
    assert merged.token_ids != before.token_ids
