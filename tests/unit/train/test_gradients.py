"""Gradients of everything that can be trained, against finite differences in float64; selections are what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spyglass.engram.feed import EngramFeed
from spyglass.lora.new import TrainableAdapter, new_adapter
from spyglass.model import VisionLanguageModel
from spyglass.params.targets import GROUPS, UNTRAINABLE
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import Sample, pack
from spyglass.train.recompute import recompute_layers
from tests.tolerance import KIND_COSINE, ROUNDED_COSINE, SLOPE_OF_NORM
from tests.unit.train.leaves import (
    FAMILIES,
    Frozen,
    check_directions,
    family,
    feed_of,
    frozen_rounding,
    kind_of,
    rounded_family,
    weight_leaves,
    wide,
    wide_step,
)
from tests.unit.train.samples import make_sample

NOT_SMOOTH = ("gate.bias", "bias_vl", "indexer")  # they only choose
PARTS = {"deepseek_v4": ([4, (3, 5), 9], [130]), "deepseek_v41": ([4, (3, 5), 9], [30])}  # every pool gets an entry
TRAINABLE = [group for group in GROUPS if group not in UNTRAINABLE]


def samples_for(model: VisionLanguageModel) -> list[Sample]:
    return [
        make_sample(model.config, parts, seed=10 * number) for number, parts in enumerate(PARTS[model.config.family])
    ]


def wide_loss(model: VisionLanguageModel, frozen: Frozen, feed: EngramFeed | None, adapter_id: int) -> torch.Tensor:
    frozen.start()
    step = wide_step(samples_for(model), model, feed, adapter_id)
    return token_loss(step_logits(model, step), step.targets_R)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_every_weight_is_the_slope_of_the_loss(name: str) -> None:
    feed, frozen = feed_of(name), Frozen()
    with wide():
        model = family(name, ops=frozen.ops)
        leaves = weight_leaves(model)
        smooth = {key: leaf for key, leaf in leaves.items() if not any(part in key for part in NOT_SMOOTH)}
        check_directions(lambda: wide_loss(model, frozen, feed, 0), smooth, SLOPE_OF_NORM)


def adapter_on(model: VisionLanguageModel, dtype: torch.dtype = torch.float32) -> TrainableAdapter:
    """An adapter of rank 2 on every group that changes what the model computes."""
    adapter = new_adapter(model, TRAINABLE, rank=2, alpha=3.0)
    generator = torch.Generator().manual_seed(2)
    for leaf in adapter.parameters.values():
        leaf.data = (torch.randn(leaf.shape, generator=generator) * 0.2).to(leaf.device, dtype)
    return adapter


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_of_every_adapter_is_the_slope_of_the_loss(name: str) -> None:
    feed, frozen = feed_of(name), Frozen()
    with wide():
        model = family(name, ops=frozen.ops)
        weight_leaves(model)
        adapter = adapter_on(model, torch.float64)
        check_directions(
            lambda: wide_loss(model, frozen, feed, adapter.adapter_id), dict(adapter.parameters), SLOPE_OF_NORM
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gradient_through_every_rounding_is_the_slope_of_what_it_adds_to(name: str) -> None:
    """The definition of straight-through, for a whole model with the released rounding on packed weights: the slope
    where each rounding adds to every input what it adds at this one.
    """
    feed, frozen = feed_of(name), Frozen()
    model = rounded_family(name, frozen)
    with wide(), frozen_rounding(frozen):
        adapter = adapter_on(model, torch.float64)
        check_directions(
            lambda: wide_loss(model, frozen, feed, adapter.adapter_id), dict(adapter.parameters), SLOPE_OF_NORM
        )


def gradients(
    model: VisionLanguageModel, adapter: TrainableAdapter, feed: EngramFeed | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    step = pack(samples_for(model), model.config, dtype=dtype, adapter_id=adapter.adapter_id, engram=feed)
    loss = token_loss(step_logits(model, step), step.targets_R)[0]
    return dict(zip(adapter.parameters, torch.autograd.grad(loss, list(adapter.parameters.values())), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_in_bfloat16_have_the_direction_of_those_in_float32(name: str) -> None:
    """On packed weights, rounded as released: everything that is trained gets a finite gradient, kind by kind in the
    direction that float32 gives where the same choices are made and every rounding adds the same. Left to themselves,
    choices and codes turn in models this small, and most of the direction is theirs.
    """
    frozen = Frozen()
    options: dict[str, Any] = {"packed": True, "numerics": "reference", "expand": False, "ops": frozen.ops}
    found = []
    with frozen_rounding(frozen):
        for dtype in (torch.bfloat16, torch.float32):
            frozen.start()
            model = family(name, **options, dtype=dtype)
            found.append(gradients(model, adapter_on(model), feed_of(name, dtype), dtype))
    got, want = found
    assert all(gradient.isfinite().all() and gradient.any() for gradient in got.values())
    kinds: dict[str, list[str]] = {"all": list(got)}
    for leaf in got:
        kinds.setdefault(kind_of(leaf), []).append(leaf)
    for kind, leaves in kinds.items():
        a, b = (torch.cat([side[leaf].flatten() for leaf in leaves]) for side in (got, want))
        cosine = float(torch.nn.functional.cosine_similarity(a, b, dim=0))
        assert cosine > (ROUNDED_COSINE[name] if kind == "all" else KIND_COSINE), (kind, cosine)


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_are_computed_again_give_the_same_gradients(name: str) -> None:
    """Bit for bit, with dropout, and with layers that read the rows of layers below (V4.1)."""
    model = family(name)
    adapter, feed = adapter_on(model), feed_of(name)
    adapter.set_dropout(0.3)
    kept = gradients(model, adapter, feed, torch.float32)
    recompute_layers(model)
    again = gradients(model, adapter, feed, torch.float32)
    assert all(torch.equal(kept[leaf], again[leaf]) for leaf in kept)
    adapter.set_dropout(0.0)
    assert not torch.equal(
        gradients(model, adapter, feed, torch.float32)["aligner.w1.lora_A"], kept["aligner.w1.lora_A"]
    )


def kept_bytes(run: Callable[[], torch.Tensor]) -> int:
    kept: dict[int, int] = {}

    def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(kept.values())


def test_what_is_computed_again_is_not_kept() -> None:
    model = family("v4")
    adapter = adapter_on(model)

    def run() -> torch.Tensor:
        step = pack(samples_for(model), model.config, dtype=torch.float32, adapter_id=adapter.adapter_id)
        return step_logits(model, step)

    whole = kept_bytes(run)
    recompute_layers(model)
    assert kept_bytes(run) < whole / 5


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_that_has_not_been_trained_changes_no_bit(name: str) -> None:
    model, feed = family(name), feed_of(name)
    samples = samples_for(model)
    before = step_logits(model, pack(samples, model.config, dtype=torch.float32, engram=feed))
    adapter = new_adapter(model, TRAINABLE, rank=2, alpha=3.0)
    after = step_logits(
        model, pack(samples, model.config, dtype=torch.float32, adapter_id=adapter.adapter_id, engram=feed)
    )
    assert torch.equal(before, after)
