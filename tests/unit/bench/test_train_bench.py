"""The training benchmark counts the operations of a pass, and what it prints is what it measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass.bench import train
from spyglass.bench.train import as_text, measure, random_samples, step_flops
from spyglass.checkpoint.random import preset_tensors
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.train.packing import pack


def test_operations_grow_with_tokens_experts_chosen_and_rows_of_the_head() -> None:
    config = parse_model_config(preset_config("tiny", packed=True), "tiny")
    specs = preset_tensors("tiny")
    samples = random_samples(config, tokens=700, text=192, learnt=64)
    assert len(samples) == 2 and all(sample.learn_T.sum() == 64 for sample in samples)
    one, two = (pack(samples[:count], config) for count in (1, 2))
    flops = [step_flops(config, step, specs) for step in (one, two)]
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.02)
    without = {name: spec for name, spec in specs.items() if ".ffn.experts." not in name}
    routed = flops[0] - step_flops(config, one, without)
    assert routed == 2 * 5 * 2 * 3 * 128 * 128 * len(one.batch.ids_T), "5 layers, 2 experts of 3 matrices"


@pytest.mark.slow
def test_a_step_is_measured_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = measure("tiny", torch.device("cpu"), tokens=1, steps=1, rank=2, rate=0.1)
    assert numbers.pictures == 1 and numbers.learnt == 64 and numbers.step_seconds > numbers.pack_seconds > 0
    assert len(numbers.loss) == train.WARM_UP + 1 and numbers.loss[1] < numbers.loss[0]
    text = as_text({"commit": "x"}, 0.1, numbers)
    told: Any = f"{numbers.tokens / numbers.step_seconds:,.0f} tokens/s"
    assert told in text and f"{numbers.trained:,} numbers" in text
