"""The residual mix goes from source to target, in serving and in training.

A doubly stochastic mix hides its transpose from sums, and a symmetric one from everything. Three streams (a, b, c)
under the cyclic mix C[0,1] = C[1,2] = C[2,0] = 1 do not: by X'_l = Σ_j C_jl X_j (spec v4 3.2, step 7; spec v41 4.3,
step 3) they come out as (c, a, b), and as (b, c, a) if the mix is transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from spyglass.ops.declare import Ops
from spyglass.ops.table import Which, bind_ops
from spyglass.quant.packed import Packed
from spyglass.train.loss import step_logits
from spyglass.train.packing import pack
from tests.small_models import build_model, empty_model, ops_of, random_weights, small_config
from tests.tolerance import OP_FLOAT32, assert_close, assert_law
from tests.unit.train.samples import make_sample

CYCLIC = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])  # [source, target]
SURE = 40.0  # logit of what is 1: e^-40 is nothing beside it
TABLES: dict[str, Callable[[], Ops]] = {
    "serving": lambda: ops_of(("cpu", "auto")),
    "reference": lambda: bind_ops("cpu", "float32", "reference"),
    "adapters": lambda: bind_ops("cpu", "float32", "training"),
}


def base_of(comb: torch.Tensor) -> torch.Tensor:
    """`base` of a mix without `fn`: pre and post of no matter, then the logits of comb, source by source."""
    return torch.cat([torch.full((6,), -SURE), SURE * comb.flatten()])


@pytest.mark.parametrize("table", TABLES)
def test_a_cyclic_mix_hands_each_stream_to_the_next(table: str) -> None:
    ops = TABLES[table]()
    a, b, c = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))  # of two rows each
    streams = torch.stack([a, b, c], dim=1)
    fn, scale = torch.zeros(15, 24), torch.ones(3)
    _, post, comb = ops.hyper_mix(streams, fn, scale, base_of(CYCLIC), norm_eps=1e-6, hc_eps=0.0, rounds=20)
    assert_close(comb, CYCLIC.expand(2, 3, 3), OP_FLOAT32)
    assert_close(ops.hyper_expand(torch.ones(2, 8), streams, post, comb), torch.stack([c, a, b], dim=1), OP_FLOAT32)


def test_the_gradient_goes_back_the_way_the_streams_came() -> None:
    """What comes out first came in last: only c moves it."""
    streams = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = TABLES["adapters"]().hyper_expand(torch.ones(1, 8), streams, torch.zeros(1, 3), CYCLIC[None])
    (gradient,) = torch.autograd.grad(out[:, 0].sum(), streams)
    assert gradient.sum(dim=-1).tolist() == [[0.0, 0.0, 8.0]]


def with_mix(weights: dict[str, Packed], comb: torch.Tensor) -> dict[str, Packed]:
    """Every hyper-connection of the layers leans towards one mix, all else as it was."""
    out = dict(weights)
    for name, weight in weights.items():
        if name.endswith("_base") and name.startswith("layers."):
            data = weight.data.clone()
            data[6:] += 4.0 * comb.flatten()
            out[name] = replace(weight, data=data)
    return out


def test_a_model_that_mixes_cyclically_is_trained_as_it_is_served() -> None:
    """Logits of the ops that train are those of the ops that serve; the transposed mix gives others."""
    config = small_config(index_topk=512)
    weights = with_mix(random_weights(empty_model(config).slots(), 3), CYCLIC)
    samples = [make_sample(config, [count], seed=count) for count in (30, 45)]
    step = pack(samples, config, dtype=torch.float32)

    def logits(which: Which, weights: dict[str, Packed]) -> torch.Tensor:
        return step_logits(build_model(config, weights, ops=bind_ops("cpu", "float32", which)), step)

    with torch.no_grad():
        served, turned = logits("auto", weights), logits("auto", with_mix(weights, CYCLIC.mT - CYCLIC))
        assert (turned - served).abs().max() > 0.1 * served.abs().max()
        assert_law(logits("training", weights), served, "adapters")
