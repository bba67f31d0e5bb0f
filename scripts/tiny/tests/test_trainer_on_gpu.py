"""A captured training step is the step, and fused ops are the ops."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from scripts.tiny.kept import Kept
from scripts.tiny.pairs import PairMasters
from scripts.tiny.tests.test_trainer import (
    QUANTISED,
    SMALL,
    config_of,
    few_samples,
    initial_of,
    small_weights,
    tensors_of,
)
from scripts.tiny.trainer import WholeTrainer
from spyglass.train.masters import Masters

pytestmark = pytest.mark.gpu


PAIRS = partial(PairMasters, targets=("attention", "experts", "tower"), rank=4, alpha=8.0, seed=0)


@pytest.mark.parametrize("masters", [Masters, PAIRS], ids=["all weights", "pairs"])
def test_a_replayed_step_changes_the_weights_as_the_step_itself(masters: type[Masters]) -> None:
    config = config_of(**QUANTISED)
    weights = small_weights(config)
    tensors = {name: tensor.cuda() for name, tensor in tensors_of(few_samples(config), config, SMALL).items()}
    eager, captured = (
        WholeTrainer(config, SMALL, initial_of(weights), device="cuda", masters=masters) for _ in range(2)
    )
    captured.capture(tensors)
    for trainer in (eager, captured):
        trainer.optimiser.rate.fill_(0.01)
    first = float(captured.replay(tensors).loss)
    assert float(eager.step(tensors).loss) == pytest.approx(first, rel=1e-3)  # the weights are still the same
    again = captured.replay(tensors)
    assert float(again.loss) < first
    assert float(eager.step(tensors).loss) == pytest.approx(float(again.loss), rel=5e-2)  # sums have no fixed order
    assert all(torch.isfinite(tensor.float()).all() for tensor in captured.state_tensors().values())


def test_a_step_is_kept_as_it_was_given_while_work_waits_on_the_gpu() -> None:
    kept, product = Kept(torch.device("cuda"), 40), torch.randn(8192, 8192, device="cuda")
    given = [{"x": torch.full((151,), number), "y": torch.full((3000,), -number)} for number in range(120)]
    for number, step in enumerate(given):
        for _ in range(10):
            product = (product @ product).clamp(-1, 1)
        for _ in range(50):  # written late, its memory free at once
            torch.stack([product[0, 0]] * 6)
        place = kept.add(step)
        read = {name: tensor.clone() for name, tensor in kept.steps[place].items()}
        kept.used(place)
        if number % 7 == 0:
            torch.cuda.synchronize()
        assert all(torch.equal(tensor.cpu(), step[name]) for name, tensor in read.items()), number
    torch.cuda.synchronize()
    for tensors, step in zip(kept.steps, given[80:], strict=True):
        assert all(torch.equal(tensor.cpu(), step[name]) for name, tensor in tensors.items())
