"""Small models that learn: a batch by heart, and the same numbers in training and in serving afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.lora.new import TrainableAdapter, new_adapter
from spyglass.lora.pool import AdapterPool
from spyglass.model import VisionLanguageModel
from spyglass.train.loop import LoopOptions, LoopResult, MicroLoss, Task, adamw, train
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import Sample, pack
from tests import engine_parts, small_v41
from tests.tolerance import LAW_OF_MAX
from tests.unit.train.leaves import FAMILIES, family, feed_of
from tests.unit.train.samples import make_sample
from tests.unit.train.test_gradients import TRAINABLE

RELEASED: dict[str, Any] = {"packed": True, "numerics": "reference", "expand": False, "dtype": torch.bfloat16}


def learn(
    model: VisionLanguageModel, name: str, folder: Path, *, steps: int, samples: list[Sample]
) -> tuple[TrainableAdapter, LoopResult]:
    """Adapters of rank 8 on every group, trained on the same samples over and over."""
    dtype = model.options.build.dtype
    adapter, feed = new_adapter(model, TRAINABLE, rank=8, alpha=16.0), feed_of(name, dtype)

    def loss(number: int) -> MicroLoss:
        step = pack(samples, model.config, dtype=dtype, slot=adapter.slot, engram=feed)
        value, targets = token_loss(step_logits(model, step), step.targets_R)
        return MicroLoss(loss=value, targets=targets)

    group = {"params": list(adapter.parameters.values()), "lr": 0.02, "weight_decay": 0.0}
    task = Task(leaves=adapter.parameters, optimisers=[adamw([group])], loss=loss)
    options = LoopOptions(steps=steps, schedule="linear", warmup=3)
    return adapter, train(task, options, folder, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fixed_batch_is_learnt_by_heart(name: str, tmp_path: Path) -> None:
    """On packed weights, with the released rounding, in bfloat16: the loss falls below 0.01."""
    model = family(name, **RELEASED)
    # a random head of this width cannot be sure of anything: its largest logit is about 7
    assert model.text.norm.weight_D is not None
    model.text.norm.weight_D *= 4
    _, result = learn(model, name, tmp_path, steps=25, samples=[make_sample(model.config, [2, (2, 2), 4])])
    assert result.loss < 0.01


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_trained_is_what_is_served(name: str, tmp_path: Path) -> None:
    """Field report 69: logits of the trainer, and of an engine with the adapter loaded, differ by rounding of sums."""
    model = family(name)
    samples = [make_sample(model.config, parts) for parts in ([21], [3, (3, 5), 9], [2, (2, 2), 4, (5, 3), 6], [40])]
    adapter, _ = learn(model, name, tmp_path, steps=4, samples=samples)
    feed = feed_of(name)
    with torch.no_grad():
        trained = step_logits(model, pack(samples, model.config, dtype=torch.float32, slot=1, engram=feed))
        base = step_logits(model, pack(samples, model.config, dtype=torch.float32, engram=feed))
    assert (trained - base).abs().max() > 0.1
    served = family(name, ops=None)
    use = AdapterPool(served).attach("trained", adapter.file())
    if name == "v41":
        store = small_v41.small_store(served.config)
        engine = small_v41.make_engine(served, store=store, step=64)
    else:
        engine = engine_parts.make_engine(served, served.config, step=64)
    rows = [engine_parts.logits_of(engine, sample.prompt, use)[sample.rows] for sample in samples]
    assert (torch.cat(rows) - trained).abs().max() <= LAW_OF_MAX * trained.abs().max()
