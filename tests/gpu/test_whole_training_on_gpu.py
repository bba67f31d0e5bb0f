"""A captured training step is the step, and fused ops are the ops."""

from __future__ import annotations

import pytest
import torch

from spyglass.train.whole import WholeTrainer
from tests.unit.train.test_whole import (
    QUANTISED,
    SMALL,
    config_of,
    few_samples,
    initial_of,
    small_weights,
    tensors_of,
)

pytestmark = pytest.mark.gpu


def test_a_replayed_step_changes_the_weights_as_the_step_itself() -> None:
    config = config_of(**QUANTISED)
    weights = small_weights(config)
    tensors = {name: tensor.cuda() for name, tensor in tensors_of(few_samples(config), config, SMALL).items()}
    eager, captured = (WholeTrainer(config, SMALL, initial_of(weights), device="cuda") for _ in range(2))
    captured.capture(tensors)
    for trainer in (eager, captured):
        trainer.optimiser.rate.fill_(0.01)
    for _ in range(3):
        one, other = eager.step(tensors), captured.replay(tensors)
        assert float(one.loss) == pytest.approx(float(other.loss), rel=2e-2)  # sums of gradients have no fixed order
    assert float(other.loss / other.count) < 4.0
    assert all(torch.isfinite(tensor.float()).all() for tensor in captured.state_tensors().values())
