"""Training on a GPU, where experts and sequences are computed many at once: the gradients of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spyglass.engram.feed import EngramFeed
from spyglass.ops.table import bind_ops
from spyglass.quant.formats import FP4
from spyglass.quant.packed import Packed
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import pack
from spyglass.train.recompute import recompute_layers
from tests import small_v41
from tests.ops.call import Source, to_device
from tests.ops.cases import sparse_attention
from tests.ops.test_training_ops import as_adapters, expert_call, leaves_of_pairs
from tests.tolerance import GRADIENT_OF_MAX, OP_FLOAT32, assert_close
from tests.unit.train.leaves import FAMILIES, family
from tests.unit.train.test_gradients import adapter_on, samples_for

pytestmark = pytest.mark.gpu
OPS = bind_ops("cuda", "float32", "training")


def same_gradients(run: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> None:
    """`run(device, *leaves)` has the value and the gradients on a GPU that it has on the host."""
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        fresh = [leaf.to(device).requires_grad_() for leaf in leaves]
        out = run(device, *fresh)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(device)
        found[device] = [out, *torch.autograd.grad((out * weight).sum(), fresh)]
    for number, (ours, expected) in enumerate(zip(found["cuda"], found["cpu"], strict=True)):
        assert ours.is_cuda
        assert_close(ours, expected, OP_FLOAT32, f"leaf {number - 1}")


def test_experts_with_their_pairs() -> None:
    x, ids, weights, stacks = expert_call(FP4)

    def run(device: str, x: torch.Tensor, weights: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        here: list[Packed] = [to_device(stack, device) for stack in stacks]
        out: torch.Tensor = OPS.experts_grouped(
            x, ids.to(device), weights, *here, limit=0.8, **as_adapters(leaves, device=device)
        )
        return out

    same_gradients(run, [x, weights, *leaves_of_pairs(Source(torch.float32))])


@pytest.mark.parametrize("picks", [False, True])
def test_attention_over_pools(picks: bool) -> None:
    call = sparse_attention(Source(torch.float32), pool=True, picks="picks" if picks else "")
    q, window, *places, sink = call.args
    options: dict[str, Any] = {name: value for name, value in call.options.items() if name != "pool_NBD"}

    def run(device: str, q: torch.Tensor, window: torch.Tensor, sink: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        here = [to_device(place, device) for place in places]
        out: torch.Tensor = OPS.sparse_attention(q, window, *here, sink, **to_device(options, device), pool_NBD=pool)
        return out

    same_gradients(run, [q, window, sink, call.options["pool_NBD"]])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_model_gives_its_adapters_the_gradients_of_the_host(name: str) -> None:
    """In float32, on packed weights, layers computed again; experts, sequences and pictures in few launches."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        model = family(name, packed=True, expand=False, device=device)
        recompute_layers(model)
        adapter, feed = adapter_on(model), None
        if name == "v41":
            feed = EngramFeed(small_v41.small_store(model.config), device=torch.device(device), dtype=torch.float32)
        step = pack(
            samples_for(model), model.config, device=device, dtype=torch.float32, slot=adapter.slot, engram=feed
        )
        loss = token_loss(step_logits(model, step), step.targets_R)[0]
        grads = torch.autograd.grad(loss, list(adapter.parameters.values()))
        found[device] = dict(zip(adapter.parameters, grads, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in found["cpu"].values())
    for leaf, expected in found["cpu"].items():
        assert expected.any(), leaf
        assert (found["cuda"][leaf].cpu() - expected).abs().max() <= GRADIENT_OF_MAX * largest, leaf
