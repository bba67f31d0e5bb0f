"""Whole-model training on bins: numbers and gradients of the defining ops, and what is trained is what is saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from scripts.tiny.bins import Capacity, Filling, Masks, lay_out
from scripts.tiny.dense_ops import StepState, training_ops
from scripts.tiny.muon import MuonSettings, orthogonalise
from scripts.tiny.trainer import WholeTrainer, imbalance
from spyglass.config.model import ModelConfig
from spyglass.engram import EngramStore
from spyglass.engram.feed import EngramFeed
from spyglass.ops.table import bind_ops
from spyglass.params.table import param_table
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches
from spyglass.quant.formats import F32
from spyglass.quant.packed import Packed
from spyglass.train.balance import BIASES, balance
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.masters import Masters
from spyglass.train.packing import Sample, pack
from tests.small_models import build_model, empty_model, random_text, random_weights, small_config
from tests.small_v41 import small_store, small_v41_config
from tests.tolerance import FLIPPED_OF_MAX, GRADIENT_OF_MAX, LAW_OF_MAX

CAPACITY = Capacity(bins=3, length=256, patches=96, cells=40, images=8, largest_image=24, targets=600)
SMALL = Capacity(bins=1, length=128, patches=40, cells=20, images=4, largest_image=24, targets=128)
QUANTISED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16], "scale_fmt": "ue8m0",
                                     "activation_scheme": "dynamic", "fmt": "e4m3"}, "expert_dtype": "fp4"}  # fmt: skip


def config_of(**changes: Any) -> ModelConfig:
    return small_config(vision_max_n_token=40, index_topk=512, hidden_size=64, moe_intermediate_size=64, **changes)


def v41_config() -> ModelConfig:
    """Lists long enough that nothing is chosen: that is how a whole model is trained."""
    return small_v41_config(index_topk=512, candidate_topk_blocks=512, hidden_size=64, moe_intermediate_size=64)


def make_sample(config: ModelConfig, parts: Any, seed: int) -> Sample:
    pieces: list[Any] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            pieces.append(random_text(part, seed + number, 68).tolist())
        else:
            source = np.random.default_rng([seed, number])
            pieces.append(Patches(source.integers(0, 256, (part[0] * part[1], 3, 4, 4), dtype=np.uint8), part))
    prompt = prompt_from_parts(pieces, config)
    learn_T = prompt.ids_T >= 0
    learn_T[0] = False
    return Sample(prompt=prompt, learn_T=learn_T)


def samples_of(config: ModelConfig) -> list[Sample]:
    mixed = ([21], [3, (3, 5), 9], [200], [2, (2, 2), 4, (5, 3), 6], [1, (4, 4), 5], [140])
    return [make_sample(config, parts, 10 * number) for number, parts in enumerate(mixed)]


def few_samples(config: ModelConfig) -> list[Sample]:
    """What `SMALL` holds."""
    return [make_sample(config, parts, 10 * n) for n, parts in enumerate(([3, (3, 5), 9], [21], [1, (4, 4), 5]))]


def filled(samples: list[Sample], capacity: Capacity = CAPACITY) -> Filling:
    filling = Filling(capacity=capacity)
    assert all(filling.add(sample) for sample in samples)
    return filling


def trainer_of(config: ModelConfig, weights: Any, capacity: Capacity = CAPACITY, **options: Any) -> WholeTrainer:
    return WholeTrainer(config, capacity, initial_of(weights), **{"dtype": torch.float32} | options)


def initial_of(weights: Any) -> Any:
    return lambda name, spec: weights[name].data.clone()


def small_weights(config: ModelConfig) -> Any:
    """Random weights; memory tables as `rounded_store` has them."""
    weights = random_weights(empty_model(config).slots(), 3)
    if config.text.engram is not None:
        for layer, table in rounded_store(config).tables.items():
            weights[f"layers.{layer}.engram.embed"] = Packed(F32, torch.from_numpy(table.data), None, table.data.shape)
    return weights


def rounded_store(config: ModelConfig) -> EngramStore:
    store = small_store(config)
    tables = {n: replace(t, data=torch.from_numpy(t.data).bfloat16().float().numpy()) for n, t in store.tables.items()}
    return replace(store, tables=tables)


def tensors_of(samples: list[Sample], config: ModelConfig, capacity: Capacity = CAPACITY) -> dict[str, torch.Tensor]:
    classes = None if config.text.engram is None else small_store(config).classes_V
    arrays = lay_out(filled(samples, capacity), config, classes)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("config", [config_of(), v41_config()], ids=["v4", "v41"])
def test_bins_give_the_logits_and_gradients_of_the_defining_ops(config: ModelConfig) -> None:
    weights, samples = small_weights(config), samples_of(config)
    trainer = trainer_of(config, weights, numerics="plain")
    tensors = tensors_of(samples, config)
    logits = trainer.logits(tensors)
    order = [sample for group in filled(samples).bins for sample in group]
    feed = None
    if config.text.engram is not None:
        feed = EngramFeed(rounded_store(config), device=torch.device("cpu"), dtype=torch.float32)
    step = pack(order, config, dtype=torch.float32, engram=feed)
    model = empty_model(config, expand=False)
    masters = Masters(model, param_table(config), initial_of(weights), fixed=BIASES)
    masters.deliver()
    expected = step_logits(model, step)
    count = len(expected)
    assert tensors["targets_R"][:count].tolist() == step.targets_R.tolist()
    close_of_max(logits[:count], expected, LAW_OF_MAX)
    token_loss(logits, tensors["targets_R"].long())[0].backward()
    token_loss(expected, step.targets_R)[0].backward()
    for stack, ours, theirs in zip(masters.stacks, trainer.masters.leaves, masters.leaves, strict=True):
        if theirs.grad is None or not theirs.grad.any():
            assert ours.grad is None or not ours.grad.any(), stack.names
            assert all(".indexer." in name for name in stack.names), stack.names
        else:
            assert ours.grad is not None
            close_of_max(ours.grad, theirs.grad, GRADIENT_OF_MAX)


def test_packed_weights_answer_as_the_masters_did() -> None:
    config = config_of(**QUANTISED)
    samples = samples_of(config)
    trainer = trainer_of(config, small_weights(config))
    logits = trainer.logits(tensors_of(samples, config))
    served = build_model(config, trainer.masters.packed(), numerics="reference", expand=False)
    step = pack([sample for group in filled(samples).bins for sample in group], config, dtype=torch.float32)
    with torch.no_grad():
        expected = step_logits(served, step)
    difference = (logits[: len(expected)] - expected).abs()
    assert difference.median() <= LAW_OF_MAX * expected.abs().max()  # where no code of a rounded row flips
    assert difference.max() <= FLIPPED_OF_MAX * expected.abs().max()


def close_of_max(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    assert (actual - expected).abs().max() <= limit * expected.abs().max()


def test_one_batch_is_learned_by_heart_in_packed_weights() -> None:
    config = config_of(**QUANTISED)
    trainer = trainer_of(config, small_weights(config), SMALL, settings=MuonSettings(decay=0.0))
    tensors = tensors_of(few_samples(config), config, SMALL)
    losses = []
    for number in range(30):
        trainer.optimiser.rate.fill_(0.02 * (1 - number / 30))
        outcome = trainer.step(tensors)
        losses.append(float(outcome.loss / outcome.count))
    assert losses[0] > 3 and losses[-1] < 0.01, losses[::10]
    assert int(outcome.right) == int(outcome.count)


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    config = config_of(**QUANTISED)
    weights, tensors = small_weights(config), tensors_of(few_samples(config), config, SMALL)
    whole, first, second = (trainer_of(config, weights, SMALL) for _ in range(3))
    for trainer in (whole, first, second):
        trainer.optimiser.rate.fill_(0.01)
        trainer.balance_rate.fill_(0.01)
    for _ in range(4):
        whole.step(tensors)
    first.step(tensors)
    first.step(tensors)
    second.restore({name: tensor.clone() for name, tensor in first.state_tensors().items()})
    for _ in range(2):
        second.step(tensors)
    for name, tensor in whole.state_tensors().items():
        assert torch.equal(tensor, second.state_tensors()[name]), name


def test_balancing_evens_out_the_use_of_experts() -> None:
    config = config_of()
    trainer = trainer_of(config, small_weights(config), SMALL, numerics="plain")
    tensors = tensors_of(few_samples(config), config, SMALL)
    rows = torch.stack([tensors["real_T"] & (tensors["kinds_T"] < 0), tensors["real_T"] & (tensors["kinds_T"] >= 0)])
    with torch.no_grad():
        trainer.logits(tensors)
        before = float(imbalance(trainer.state.loads))
        for _ in range(50):
            balance(trainer.masters.fixed, trainer.state.loads, config.text, 0.02)
            trainer.logits(tensors)
    assert float(imbalance(trainer.state.loads)) < 0.7 * before
    assert all(load.sum(dim=1).tolist() == (2 * rows.sum(dim=1)).tolist() for load in trainer.state.loads)


def test_attention_over_bins_rounds_its_probabilities_as_serving_does() -> None:
    """Keys 256 and -256 with p = 1 and exp(-2^-10), which bfloat16 rounds to 1: they cancel exactly."""
    state = StepState()
    state.begin(Masks(window_BLL=torch.ones(1, 2, 2, dtype=torch.bool), pool_BLP={}), torch.ones(2, dtype=torch.bool))
    keys = torch.tensor([[[0.0, 256.0], [-(2.0**-10), -256.0]]], dtype=torch.bfloat16)
    q = torch.tensor([[[1.0, 0.0]]] * 2, dtype=torch.bfloat16)
    places = [torch.zeros(1, 1), torch.zeros(2), torch.zeros(2), torch.ones(2), torch.zeros(1)]
    for ops in (training_ops("cpu", "bfloat16", state, compiled=False), bind_ops("cpu", "bfloat16", "reference")):
        out = ops.sparse_attention(q, keys, *(place.int() for place in places), scale=1.0, window_width=2)
        assert out[..., 1].tolist() == [[0.0], [0.0]]


def test_orthogonalised_updates_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
    for value in (matrices, matrices.mT.contiguous()):
        singular = torch.linalg.svdvals(orthogonalise(value))
        assert 0.6 < float(singular.min()) and float(singular.max()) < 1.3


def test_what_has_no_room_is_refused_and_leaves_the_step_as_it_was() -> None:
    config = config_of()
    filling = Filling(capacity=CAPACITY)
    long = make_sample(config, [257], 0)
    large = make_sample(config, [2, (5, 5), 2], 0)
    assert not filling.add(long) and not filling.add(large) and filling == Filling(capacity=CAPACITY)
    taken = 0
    while filling.add(make_sample(config, [100], taken)):
        taken += 1
    assert taken == 6 and filling.used == [200, 200, 200]
