"""Adapters that peft wrote and adapters that peft read, against its logits on transformers' model, fp32 plain.

Made by make_lora.py. In the square model a transposed product of the experts has the right shape and the wrong values.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.peft import read_adapter
from spyglass.lora.pool import AdapterPool
from spyglass.lora.write import write_adapter
from tests.driver import Part, build_step, memory_for, text_tokens
from tests.golden.lora_case import COLUMNS, LENGTHS, SQUARE, config, our_adapter, prompt, weights
from tests.small_models import build_model
from tests.tolerance import PLAIN_LOGITS, assert_close

pytestmark = pytest.mark.parametrize("name", SQUARE)


def logits(name: str, adapter: AdapterFile | None) -> dict[str, torch.Tensor]:
    """Of both prompts in one step."""
    model = build_model(config(SQUARE[name]), weights(SQUARE[name]))
    adapter_id = 0 if adapter is None else AdapterPool(model).attach("it", adapter).adapter_id
    parts = [Part(sequence=s, tokens=text_tokens(prompt(length)), start=0) for s, length in enumerate(LENGTHS)]
    batch, cache, _ = build_step(memory_for(model, len(parts), max(LENGTHS)), parts)
    batch = dataclasses.replace(batch, adapter_T=torch.full_like(batch.seq_T, adapter_id))
    with torch.inference_mode():
        out = model(batch, cache).split(list(LENGTHS))
    return {str(length): rows[:, COLUMNS] for length, rows in zip(LENGTHS, out, strict=True)}


def stored(golden: Path, name: str) -> dict[str, Any]:
    with np.load(golden / "lora" / f"{name}.npz") as found:
        return dict(found)


def test_what_peft_wrote_gives_its_logits(name: str, golden: Path) -> None:
    """Ranks and alphas by pattern, stacked experts (`target_parameters`), the square model with rsLoRA."""
    theirs, base = stored(golden, f"peft-{name}"), logits(name, None)
    ours = logits(name, read_adapter(golden / "lora" / f"peft-{name}"))
    for length in theirs:
        assert_close(ours[length], theirs[length], PLAIN_LOGITS, f"{name} {length}")
        assert np.abs(base[length].numpy() - theirs[length]).max() > 1000 * PLAIN_LOGITS.absolute


def test_what_peft_read_gives_the_logits_it_gives_here(name: str, golden: Path, tmp_path: Path) -> None:
    """All groups of transformers' text model, the block-diagonal map and two As per expert included; read back too."""
    theirs = stored(golden, f"ours-{name}")
    write_adapter(
        tmp_path, our_adapter(SQUARE[name]), names="hf", num_experts=config(SQUARE[name]).text.n_routed_experts
    )
    for adapter in (our_adapter(SQUARE[name]), read_adapter(tmp_path)):
        ours = logits(name, adapter)
        for length in theirs:
            assert_close(ours[length], theirs[length], PLAIN_LOGITS, f"{name} {length}")


def test_what_we_write_is_what_peft_read(name: str, golden: Path, tmp_path: Path) -> None:
    """The file has changed since peft loaded it? Then make_lora.py must be run again."""
    write_adapter(
        tmp_path, our_adapter(SQUARE[name]), names="hf", num_experts=config(SQUARE[name]).text.n_routed_experts
    )
    with safe_open(tmp_path / "adapter_model.safetensors", "np") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
    found = {"config": json.loads((tmp_path / "adapter_config.json").read_text()), "shapes": shapes}
    assert found == json.loads((golden / "lora" / f"ours-{name}.json").read_text())
