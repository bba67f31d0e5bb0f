"""Adapters in a model: what fits and what does not, whose rows are whose, what is left behind (nothing)."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

import pytest
import torch

from spyglass.errors import AdapterError
from spyglass.layers.build import BuildContext
from spyglass.layers.linear import GroupedLinear
from spyglass.lora.fit import MAX_RANK
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.modules import find_targets
from spyglass.lora.pool import AdapterPool
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import encode
from spyglass.quant.formats import F32
from tests.adapter_parts import Small, logits_together, random_adapter, small
from tests.param_parts import param
from tests.tolerance import OP_FLOAT32, assert_close


@pytest.fixture(scope="module")
def world() -> Small:
    return small("v4", seed=5)


@pytest.fixture(scope="module")
def model(world: Small) -> Any:
    return world.model()


def one(world: Small, name: str, rank: int = 2, **options: Any) -> AdapterFile:
    """A pair for one module."""
    everything = random_adapter({name: world.shapes[name]}, ["attention", "indexer", "experts", "aligner"], rank=rank)
    return AdapterFile(modules={name: everything.modules[name]}, **options)


def touched(model: Any) -> list[str]:
    """LoraTargets with a bank."""
    places = find_targets(model)
    return [name for name, place in {**places.linears, **places.experts}.items() if place.adapter is not None]


def test_every_pair_lands_on_its_own_module_and_no_other(world: Small, model: Any) -> None:
    pool = AdapterPool(model)
    count = len(model.slots())
    for name in ("layers.1.attn.wq_b", "layers.1.attn.indexer.wq_b", "layers.3.attn.wkv", "aligner.w1"):
        use = pool.attach("it", one(world, name))
        assert touched(model) == [name] and pool["it"].counts == one(world, name).counts()
        assert bool(use.vision_digest) == (name == "aligner.w1") and bool(use.text_digest) == (name != "aligner.w1")
        assert len(model.slots()) == count, "an adapter changes nothing about what a checkpoint must hold"
        pool.detach("it")
    assert touched(model) == []


def test_a_query_adapter_leaves_the_choice_of_the_indexer_alone_and_the_other_way_round(
    world: Small, model: Any
) -> None:
    """On the first layer that chooses: `attn.wq_b` cannot move its topk_indices, `attn.indexer.wq_b` does."""
    pool, prompt = AdapterPool(model), world.prompt([60])
    indexer, topk_indices = model.text.layers[1].attn.indexer, []
    kept = indexer.topk_indices
    indexer.topk_indices = lambda *args: topk_indices.append(kept(*args)) or topk_indices[-1]
    try:
        logits = []
        for name in (None, "layers.1.attn.wq_b", "layers.1.attn.indexer.wq_b"):
            use = pool.attach("it", one(world, name or "aligner.w1", rank=4))
            logits += logits_together(world.engine(model, step=64), [(prompt, use)])
            pool.detach("it")
    finally:
        del indexer.topk_indices
    assert torch.equal(topk_indices[0], topk_indices[1]) and not torch.equal(topk_indices[0], topk_indices[2])
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[1], logits[2])


def test_the_block_diagonal_map_never_mixes_its_groups() -> None:
    """Two groups of four inputs, A = e0, B = 1 for group 0 and 0 for group 1: group 1 is exactly the base."""
    ops = bind_ops("cpu", "float32", "reference")
    name = "layers.0.attn.wo_a"
    params = {name: param(6, 4, groups=2, adapter="attention")}
    layer = GroupedLinear(BuildContext(ops=ops, device=torch.device("cpu"), dtype=torch.float32, params=params), name)
    layer.slots()[0].put(encode(torch.randn(6, 4), F32))
    x, adapters = torch.randn(5, 2, 4), torch.full((5,), 2, dtype=torch.int32)
    base, b = layer(x), torch.cat([torch.ones(3, 1), torch.zeros(3, 1)])
    shared = LowRank(a_RI=torch.tensor([[1.0, 0, 0, 0]]), b_OR=b, alpha=0.5)
    pool = AdapterPool(layer)
    assert pool.attach("shared", AdapterFile(modules={name: shared})).adapter_id == 2
    out = layer(x, adapters)
    assert torch.equal(out[:, 1], base[:, 1])
    assert_close(out[:, 0], base[:, 0] + 0.5 * x[:, 0, :1], OP_FLOAT32)
    own = LowRank(a_RI=torch.eye(4)[[0, 3]], b_OR=torch.ones(6, 1), alpha=2.0)
    assert pool.attach("own", AdapterFile(modules={name: own})).adapter_id == 3
    out = layer(x, adapters + 1)
    assert_close(out[:, 0], base[:, 0] + 2.0 * x[:, 0, :1], OP_FLOAT32)
    assert_close(out[:, 1], base[:, 1] + 2.0 * x[:, 1, 3:], OP_FLOAT32)


def test_what_does_not_fit_is_refused_with_what_was_expected(world: Small, model: Any) -> None:
    pool = AdapterPool(model)
    good = one(world, "layers.0.attn.wq_a").modules
    pair = good["layers.0.attn.wq_a"]

    def refused(modules: dict[str, LowRank], message: str, **options: Any) -> None:
        with pytest.raises(AdapterError, match=message):
            pool.attach("bad", AdapterFile(modules={**good, **modules}, **options))
        assert touched(model) == [] and pool.names == ()

    refused({"layers.9.attn.wq_a": pair}, r"1 of 2 modules of the adapter matched.*no layers\.9\.attn\.wq_a")
    refused({"layers.0.attn.indexer.wq_b": pair}, "1 of 2 modules")
    refused({"layers.0.ffn.experts.6.w1": pair}, "1 of 2 modules")
    refused({"layers.0.attn.wo_b": pair}, r"made for another model: layers\.0\.attn\.wo_b is 48 x 60")
    refused({"layers.0.attn.wo_a": pair}, "in 3 groups")
    refused({}, r"layers\.0\.ffn\.experts has 6 experts, the adapter 5", stacked={"layers.0.ffn.experts": 5})
    with pytest.raises(AdapterError, match=r"layers\.0\.attn\.wq_a has rank 64, the limit is 16"):
        AdapterPool(model, max_rank=16).attach("big", one(world, "layers.0.attn.wq_a", rank=64))
    with pytest.raises(AdapterError, match=f"rank {MAX_RANK + 1}, the limit is {MAX_RANK}"):
        pool.attach("big", one(world, "layers.0.attn.wq_a", rank=MAX_RANK + 1))


@pytest.mark.parametrize("most", [8, 32, 64, 128, 256, MAX_RANK])
def test_every_rank_up_to_a_limit_runs_on_the_experts(most: int, world: Small, model: Any) -> None:
    """No part of the code has a limit of its own."""
    pool = AdapterPool(model, max_rank=most)
    uses = [
        pool.attach(str(rank), random_adapter(world.shapes, ["experts"], rank=rank, seed=rank)) for rank in (4, most)
    ]
    for out in logits_together(world.engine(model), [(world.prompt([5]), use) for use in uses]):
        assert torch.isfinite(out).all()
    for name in pool.names:
        pool.detach(name)


def test_an_adapter_for_some_experts_changes_only_rows_that_chose_them(world: Small, model: Any) -> None:
    """Choices of the hash layer do not depend on what lies below, so its experts show it row by row."""
    pool, prompt = AdapterPool(model), world.prompt([30])
    only = one(world, "layers.0.ffn.experts.2.w2", rank=4)
    seen: list[torch.Tensor] = []
    experts = model.text.layers[0].ffn.experts
    handle = experts.register_forward_hook(lambda module, given, out: seen.extend((given[1], out)))
    try:
        use = pool.attach("it", only)
        for each in (dataclasses.replace(use, adapter_id=0), use):
            logits_together(world.engine(model, step=64), [(prompt, each)])
    finally:
        handle.remove()
        pool.detach("it")
    chosen = (seen[0] == 2).any(dim=1)
    assert chosen.any() and not chosen.all()
    assert_close(seen[3][~chosen], seen[1][~chosen], OP_FLOAT32)
    assert ((seen[3] - seen[1]).abs().amax(dim=1)[chosen] > 1e-3).all()


def test_the_bytes_of_an_adapter_are_those_of_its_banks(world: Small) -> None:
    """Experts as they are stored, all else fp32; an A of its own for each group of `wo_a` makes B wider."""
    adapter = random_adapter(world.shapes, ["attention", "shared", "experts", "tower"], rank=3, dtype=torch.bfloat16)
    name = "layers.1.attn.wo_a"
    groups = world.config.text.o_groups
    per_group = dataclasses.replace(adapter.modules[name], a_RI=adapter.modules[name].a_RI.repeat(groups, 1))
    adapter = AdapterFile(modules={**adapter.modules, name: per_group})
    model = world.model()
    AdapterPool(model).attach("it", adapter)
    places = find_targets(model)
    rows = [part for place in places.linears.values() if place.adapter for part in place.adapter.by_adapter.values()]
    for place in places.experts.values():
        rows += [part.rows for parts in place.adapter.by_adapter.values() for part in parts.values()]
    assert (
        sum(t.nbytes for row in rows for t in (row.a_RI, row.b_RO, row.scale_R, row.adapter_R)) == adapter.bank_bytes()
    )


def test_digests_tell_weights_alpha_factor_and_rank_apart_and_pictures_from_text(world: Small) -> None:
    groups = ["attention", "aligner"]
    base = random_adapter(world.shapes, groups, seed=1)
    assert base.digests() == random_adapter(world.shapes, groups, seed=1).digests()
    others = [
        random_adapter(world.shapes, groups, seed=2),
        random_adapter(world.shapes, groups, seed=1, alpha=5.0),
        random_adapter(world.shapes, groups, seed=1, rank=4),
        random_adapter(world.shapes, groups, seed=1, rslora=True),
    ]
    digests = [adapter.digests() for adapter in [base, *others]] + [base.digests(0.5)]
    assert len({text for text, _ in digests}) == len(digests) == len({seen for _, seen in digests})
    halves = [
        {n: dataclasses.replace(p, **{side: getattr(p, side) + 1e-3}) for n, p in base.modules.items()}
        for side in ("a_RI", "b_OR")
    ]
    for text, seen in (AdapterFile(modules=modules).digests() for modules in halves):
        assert text != base.digests()[0] and seen != base.digests()[1]
    reads = random_adapter(world.shapes, ["attention"], seed=1)
    assert reads.digests() == (base.digests()[0], b"")
    moved = {name.replace("layers.0.attn.wkv", "layers.1.attn.wkv"): pair for name, pair in reads.modules.items()}
    assert AdapterFile(modules=moved).digests()[0] != reads.digests()[0]


def test_what_is_attached_is_a_copy(world: Small, model: Any) -> None:
    """So that digests stay true whatever a caller does with its tensors afterwards; rank 1 needs no transposing."""
    pool, prompt = AdapterPool(model), world.prompt([20])
    for rank in (1, 3):
        adapter = random_adapter(world.shapes, ["attention", "experts", "shared"], rank=rank)
        use = pool.attach("it", adapter)
        (before,) = logits_together(world.engine(model), [(prompt, use)])
        for pair in adapter.modules.values():
            pair.a_RI.fill_(9.0)
            pair.b_OR.fill_(9.0)
        (after,) = logits_together(world.engine(model), [(prompt, use)])
        assert torch.equal(before, after)
        pool.detach("it")


def test_a_factor_that_means_nothing_is_refused(world: Small, model: Any) -> None:
    for factor in (0.0, float("nan"), float("inf"), 1e-300, -1e300):
        with pytest.raises(AdapterError, match="factor is"):
            AdapterPool(model).attach("it", one(world, "layers.0.attn.wq_a"), factor=factor)


def test_names_are_looked_up_exactly_and_the_known_ones_listed(world: Small, model: Any) -> None:
    pool = AdapterPool(model)
    first = pool.attach("a", one(world, "layers.0.attn.wq_a"))
    assert pool.use("a") == first
    with pytest.raises(AdapterError, match="no adapter 'A'; known are: a"):
        pool.use("A")
    with pytest.raises(AdapterError, match="'a' is already there"):
        pool.attach("a", one(world, "layers.0.attn.wq_b"))
    pool.detach("a")
    with pytest.raises(AdapterError, match="known are: none"):
        pool.detach("a")
    assert pool.attach("a", one(world, "layers.0.attn.wq_a")).adapter_id != first.adapter_id, (
        "a number is never given twice"
    )
    pool.detach("a")


def test_loads_and_unloads_of_one_name_from_many_threads_end_in_order(world: Small, model: Any) -> None:
    """Every call succeeds or says why; no name is ever listed twice; in the end nothing is left."""
    pool, adapter = AdapterPool(model), one(world, "layers.0.attn.wq_a")
    surprises: list[BaseException] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        try:
            for _ in range(40):
                act = source.choice(
                    [lambda: pool.attach("x", adapter), lambda: pool.detach("x"), lambda: pool.use("x")]
                )
                try:
                    act()
                except AdapterError:
                    pass
                assert len(set(pool.names)) == len(pool.names)
        except BaseException as error:
            surprises.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not surprises
    for name in pool.names:
        pool.detach(name)
    assert touched(model) == []
