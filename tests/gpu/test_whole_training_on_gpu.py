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
    first = float(captured.replay(tensors).loss)
    assert float(eager.step(tensors).loss) == pytest.approx(first, rel=1e-3)  # the weights are still the same
    again = captured.replay(tensors)
    assert float(again.loss) < first
    assert float(eager.step(tensors).loss) == pytest.approx(float(again.loss), rel=5e-2)  # sums have no fixed order
    assert all(torch.isfinite(tensor.float()).all() for tensor in captured.state_tensors().values())
