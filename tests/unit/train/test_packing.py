"""Packed training steps: a sequence computes the same beside any neighbours, and what the engine serves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.engram.feed import EngramFeed
from spyglass.train.loss import IGNORED, step_logits, token_loss
from spyglass.train.packing import Sample, pack
from tests import engine_parts, small_v41
from tests.small_models import small_config, small_model
from tests.tolerance import LAW_OF_MAX, OP_FLOAT32, assert_close
from tests.unit.train.samples import make_samples


def family(name: str) -> tuple[Any, Any, Any]:
    """Model, engram feed and an engine over the same weights."""
    if name == "v41":
        config = small_v41.small_v41_config()
        model = small_v41.small_v41_model(config=config)
        store = small_v41.small_store(config)
        feed = EngramFeed(store, device=torch.device("cpu"), dtype=torch.float32)
        return model, feed, small_v41.make_engine(model, store=store, step=256)
    config = small_config(vision_max_n_token=40)
    model = small_model(config=config)
    return model, None, engine_parts.make_engine(model, config, step=256)


def packed_logits(model: Any, samples: list[Sample], feed: Any) -> torch.Tensor:
    with torch.no_grad():
        return step_logits(model, pack(samples, model.config, dtype=torch.float32, engram=feed))


def close_of_max(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= LAW_OF_MAX * expected.abs().max()


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_packed_logits_are_those_of_each_sequence_alone(name: str) -> None:
    model, feed, _ = family(name)
    samples = make_samples(model.config)
    alone = torch.cat([packed_logits(model, [sample], feed) for sample in samples])
    close_of_max(packed_logits(model, samples, feed), alone)


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_training_logits_are_serving_logits(name: str) -> None:
    model, feed, engine = family(name)
    samples = make_samples(model.config)
    served = [engine_parts.logits_of(engine, sample.prompt)[sample.rows] for sample in samples]
    close_of_max(packed_logits(model, samples, feed), torch.cat(served))


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_gradients_reach_the_embedding_through_pages_written_in_place(name: str) -> None:
    """A row's key is stored in a page: what later rows read from there must carry its gradient."""
    model, feed, _ = family(name)
    sample = make_samples(model.config)[2]
    step = pack([replace(sample, learn_T=np.arange(len(sample.prompt)) == 140)], model.config, dtype=torch.float32,
                engram=feed)  # fmt: skip
    streams = model.embed(step.batch).detach().requires_grad_()
    hidden, _ = model.text(streams, step.batch, step.cache)
    loss, count = token_loss(model.logits(hidden, step.batch.logit_rows_R), step.targets_R)
    loss.backward()
    assert count == 1 and streams.grad is not None
    reached = streams.grad.flatten(1).abs().amax(dim=1) > 0
    assert reached[139] and reached[:139].sum() > 100 and not reached[140:].any()


def test_targets_are_the_tokens_after_the_rows() -> None:
    config = small_config(vision_max_n_token=40)
    samples = make_samples(config)
    step = pack(samples, config)
    first = np.cumsum([0, *(len(sample.prompt) for sample in samples)])
    expected = [
        (first[number] + position - 1, sample.prompt.ids_T[position])
        for number, sample in enumerate(samples)
        for position in np.flatnonzero(sample.learn_T)
    ]
    assert list(zip(step.batch.logit_rows_R.tolist(), step.targets_R.tolist(), strict=True)) == expected


def test_pictures_and_first_tokens_are_refused_as_targets() -> None:
    sample = make_samples(small_config(vision_max_n_token=40))[1]
    for position in (0, int(np.flatnonzero(sample.prompt.ids_T < 0)[0])):
        with pytest.raises(AssertionError, match="cannot be a target"):
            _ = replace(sample, learn_T=np.arange(len(sample.prompt)) == position).rows


def test_loss_is_a_sum_over_counted_targets() -> None:
    logits_RV = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    targets_R = torch.tensor([3, IGNORED, 0, 10, IGNORED, 5, 5])
    loss, count = token_loss(logits_RV, targets_R)
    kept = targets_R != IGNORED
    expected = -logits_RV[kept].double().log_softmax(dim=1).gather(1, targets_R[kept, None]).sum()
    assert int(count) == 5
    assert_close(loss, expected, OP_FLOAT32)
