"""Weights that are drawn instead of read: every mechanism runs, formats and sizes are the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spyglass import LLM, SamplingParams
from spyglass.checkpoint.dummy import load_dummy
from spyglass.checkpoint.random import new_checkpoint
from spyglass.errors import CheckpointError
from spyglass.layers.build import held_tensors
from spyglass.model import load_model
from spyglass.quant.packed import WeightSlot


@pytest.mark.parametrize("preset", ["tiny", "tiny-v41"])
def test_drawn_weights_have_the_formats_and_sizes_of_the_files(preset: str, checkpoint_of: Callable[..., Path]) -> None:
    folder = checkpoint_of(preset)
    read, drawn = load_model(folder, progress=False), load_model(folder, load="dummy", progress=False)
    assert drawn.numerics == read.numerics
    facts = [[(t.shape, t.dtype) for t in held_tensors(loaded.model)] for loaded in (read, drawn)]
    assert facts[0] == facts[1]


def test_no_tensor_is_left_undrawn(tmp_path: Path) -> None:
    new_checkpoint(tmp_path / "m", "tiny", headers_only=True)
    model = load_model(tmp_path / "m", load="dummy", progress=False).model
    for tensor in held_tensors(model):
        if tensor.numel() > 64 and tensor.dtype != torch.bool and not tensor.is_inference():
            assert tensor.view(-1)[:64].float().unique().numel() > 1


def test_a_preset_by_name_needs_no_files_and_answers() -> None:
    llm = LLM("tiny", load="dummy", max_length=256)
    out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    assert len(out.token_ids) == 4


def test_two_tensors_do_not_hold_the_same_numbers(tmp_path: Path) -> None:
    new_checkpoint(tmp_path / "m", "mini", headers_only=True)
    model = load_model(tmp_path / "m", load="dummy", images=False, progress=False).model
    stacks = model.text.layers[0].ffn.experts.stacks  # type: ignore[union-attr]
    assert not torch.equal(stacks["w1"].data[0], stacks["w1"].data[1])


def test_a_weight_of_no_configuration_is_refused() -> None:
    slot = WeightSlot("layers.0.surprise", (2, 2), "matrix", lambda packed: None)
    with pytest.raises(CheckpointError, match="surprise"):
        load_dummy([slot], {}, torch.device("cpu"), progress=False)
