"""What benchmarks hold their times against: the operations and bytes that a step needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spyglass.bench.engine import step_products
from spyglass.bench.model import step_bytes
from spyglass.bench.train import random_samples, step_flops
from spyglass.bench.vision import TOWERS, tower_flops
from spyglass.checkpoint.random import preset_tensors
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.model import load_model
from spyglass.train.packing import pack


@pytest.mark.parametrize(
    ("family", "grid", "gflop"),
    [("v4", (24, 138), 4205), ("v4", (42, 74), 3863), ("v41", (60, 150), 18173), ("v41", (3, 3063), 18782)],
)
def test_operations_of_the_tower_are_those_of_the_analysis(family: str, grid: tuple[int, int], gflop: int) -> None:
    config, hidden = TOWERS[family]
    assert tower_flops(config, hidden, [grid]) / 1e9 == pytest.approx(gflop, rel=3e-3)
    assert tower_flops(config, hidden, [grid] * 2) == 2 * tower_flops(config, hidden, [grid])


def test_a_step_multiplies_the_dense_weights_and_the_chosen_experts(checkpoint_of: Callable[..., Path]) -> None:
    loaded = load_model(checkpoint_of("tiny", format="bf16"), dtype="bfloat16", images=False, progress=False)
    text = loaded.config.text
    expert = 3 * text.hidden_size * text.moe_intermediate_size
    chosen = len(text.layers) * text.num_experts_per_tok * expert
    head, shared = text.vocab_size * text.hidden_size, len(text.layers) * expert
    assert head + chosen + shared < step_products(loaded, 1) < 1.5 * (head + chosen + shared)
    assert step_products(loaded, 3) == 3 * step_products(loaded, 1)


def test_a_step_reads_all_dense_weights_and_the_chosen_experts(checkpoint_of: Callable[..., Path]) -> None:
    folder = checkpoint_of("tiny", format="bf16")
    loaded = load_model(folder, dtype="bfloat16", images=False, progress=False)
    text = loaded.config.text
    one, many = step_bytes(folder, loaded, 1), step_bytes(folder, loaded, 10**4)
    expert = 3 * text.hidden_size * text.moe_intermediate_size * 2
    left_out = len(text.layers) * expert * (text.n_routed_experts - text.num_experts_per_tok)
    rows = (step_bytes(folder, loaded, 2 * 10**4) - many) / 10**4  # cache rows of one sequence
    assert (many - 10**4 * rows) - (one - rows) == pytest.approx(left_out, rel=1e-3)
    head = text.vocab_size * text.hidden_size * 2
    assert head < one < head + 40e6


def test_operations_of_training_grow_with_tokens_and_experts_chosen() -> None:
    config, specs = parse_model_config(preset_config("tiny", packed=True), "tiny"), preset_tensors("tiny")
    samples = random_samples(config, tokens=700, text=192, learnt=64)
    assert len(samples) == 2 and all(sample.learn_T.sum() == 64 for sample in samples)
    one, two = (pack(samples[:count], config) for count in (1, 2))
    flops = [step_flops(config, step, specs) for step in (one, two)]
    assert flops[1] == pytest.approx(2 * flops[0], rel=0.02)
    without = {name: spec for name, spec in specs.items() if ".ffn.experts." not in name}
    routed = flops[0] - step_flops(config, one, without)
    assert routed == 2 * 5 * 2 * 3 * 128 * 128 * len(one.batch.ids_T), "5 layers, 2 experts of 3 matrices"
