"""Adapters to train: they begin as nothing, want gradients everywhere, and what they learnt is what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.errors import AdapterError
from spyglass.lora.modules import find_targets
from spyglass.lora.new import TRAINED_ADAPTER, new_adapter
from spyglass.lora.peft import read_adapter
from spyglass.lora.pool import AdapterPool
from spyglass.lora.use import AdapterHandle
from spyglass.lora.write import write_adapter
from spyglass.params.targets import check_targets, describe_counts
from tests.adapter_parts import Small, logits_together, small
from tests.tolerance import assert_law

TRAINABLE = ["attention", "compressor", "shared", "experts", "tower", "aligner"]
USE = AdapterHandle(adapter_id=TRAINED_ADAPTER)


@pytest.fixture(params=["v4", "v41"])
def world(request: pytest.FixtureRequest) -> Small:
    return small(request.param, seed=9)


def run(world: Small, model: Any, use: AdapterHandle) -> torch.Tensor:
    (out,) = logits_together(world.engine(model), [(world.prompt([3, (4, 4), 30]), use)])
    return out


def test_a_new_adapter_changes_nothing_and_a_trained_one_is_what_is_served(world: Small, tmp_path: Path) -> None:
    """Through a file in either spelling and back into the banks: the logits of training."""
    model = world.model()
    base = run(world, model, AdapterHandle())
    adapter = new_adapter(model, TRAINABLE, rank=3, alpha=6.0)
    assert torch.equal(run(world, model, USE), base)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, leaf in adapter.parameters.items():
            assert leaf.requires_grad and leaf.dtype == torch.float32
            if name.endswith(".lora_B"):
                leaf.normal_(0.0, 0.1, generator=generator)
    trained = run(world, model, USE)
    assert (trained - base).abs().max() > 0.1
    for names in ("native", "hf"):
        write_adapter(tmp_path / names, adapter.file(), names=names, num_experts=6)  # type: ignore[arg-type]
    adapter.detach()
    assert torch.equal(run(world, model, AdapterHandle()), base)
    pool = AdapterPool(model)
    for names in ("native", "hf"):
        served = run(world, model, pool.attach(names, read_adapter(tmp_path / names)))
        assert_law(served, trained, names)
    assert pool["native"].counts == adapter.counts


def test_every_leaf_gets_a_gradient_through_its_bank(world: Small) -> None:
    """Linear by linear and expert by expert, without the rest of the model."""
    model = world.model()
    adapter = new_adapter(model, TRAINABLE, rank=2, alpha=4.0)
    places = find_targets(model)
    adapter_ids = torch.full((7,), TRAINED_ADAPTER, dtype=torch.int32)
    with torch.no_grad():
        for leaf in adapter.parameters.values():
            leaf.normal_()
    total = torch.zeros(())
    for name, linear in places.linears.items():
        if linear.adapter is not None:
            shape = places.params[name].map_shape
            x = torch.randn(7, shape[0], shape[1]) if shape[0] > 1 else torch.randn(7, shape[1])
            total = total + linear(x, adapter_ids).square().sum()
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(7)]).to(torch.int32)
    ids[:6, 0], ids[:6, 1] = torch.arange(6), (torch.arange(6) + 1) % 6
    for experts in places.experts.values():
        total = total + experts(torch.randn(7, 48), ids, torch.rand(7, 2), adapter_ids).square().sum()
    total.backward()
    for name, leaf in adapter.parameters.items():
        assert leaf.grad is not None and torch.isfinite(leaf.grad).all() and leaf.grad.abs().sum() > 0, name


def test_where_it_starts_depends_on_the_seed_and_the_module_alone(world: Small) -> None:
    first = new_adapter(world.model(), ["attention", "experts"], rank=2, alpha=1.0, seed=4)
    other = new_adapter(world.model(), ["experts"], rank=2, alpha=8.0, seed=4)
    third = new_adapter(world.model(), ["experts"], rank=2, alpha=8.0, seed=5)
    for name, leaf in other.parameters.items():
        assert torch.equal(leaf, first.parameters[name])
        if name.endswith("lora_A"):
            assert not torch.equal(leaf, third.parameters[name])
            bound = leaf.shape[1] ** -0.5
            assert 0.9 * bound < leaf.abs().max() <= bound


def test_dropout_is_off_unless_it_is_set_and_keeps_the_mean(world: Small) -> None:
    model = world.model()
    adapter = new_adapter(model, ["aligner"], rank=2, alpha=2.0)
    linear = find_targets(model).linears["aligner.w1"]
    with torch.no_grad():
        adapter.parameters["aligner.w1.lora_B"].normal_()
    x, adapter_ids = torch.randn(1, linear.in_features).expand(4000, -1), torch.full((4000,), 1, dtype=torch.int32)
    with torch.no_grad():
        plain = linear(x, adapter_ids)
        assert torch.equal(linear(x, adapter_ids), plain)
        adapter.set_dropout(0.5)
        torch.manual_seed(0)
        dropped = linear(x, adapter_ids)
        adapter.set_dropout(0.0)
    assert not torch.equal(dropped, plain) and torch.equal(linear(x, adapter_ids), plain)
    spread = dropped.std(dim=0) / len(dropped) ** 0.5
    assert ((dropped.mean(dim=0) - plain[0]).abs() < 5 * spread).all()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["indexer"], "indexer cannot be trained: the loss of the language model has no gradient there"),
        (["engram"], "engram cannot be trained: .* frozen"),
        (["attention", "router"], "'router' is not a group"),
        ([], "no targets"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(targets: list[str], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        check_targets(targets)


def test_groups_the_model_does_not_have_match_zero_modules(world: Small) -> None:
    blind = world.model(pictures=False)
    with pytest.raises(AdapterError, match="0 modules matched for tower"):
        new_adapter(blind, ["attention", "tower"], rank=2, alpha=2.0)
    for rank, alpha in ((0, 1.0), (10_000, 1.0), (2, 0.0), (2, float("nan"))):
        with pytest.raises(AdapterError, match=r"rank|alpha"):
            new_adapter(blind, ["attention"], rank=rank, alpha=alpha)
    new_adapter(blind, ["attention"], rank=2, alpha=2.0)
    with pytest.raises(AdapterError, match="already holds an adapter"):
        new_adapter(blind, ["shared"], rank=2, alpha=2.0)


def test_counts_are_told_group_by_group_pictures_apart() -> None:
    assert describe_counts({"attention": 3, "experts": 48}) == "51 modules: text: attention 3, experts 48; vision: none"
    assert describe_counts({"aligner": 1}) == "1 module: text: none; vision: aligner 1"
