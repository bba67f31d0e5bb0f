"""The dense ops of the recipe mix streams the way the serving ops do (see tests/laws/test_stream_orientation.py)."""

from __future__ import annotations

import torch

from scripts.tiny.dense_ops import StepState, training_ops
from spyglass.ops.table import bind_ops
from tests.laws.test_stream_orientation import CYCLIC, base_of
from tests.tolerance import OP_FLOAT32, assert_close


def test_a_cyclic_mix_and_its_gradient_go_the_way_of_the_reference() -> None:
    results = []
    for ops in (training_ops("cpu", "float32", StepState(), compiled=False), bind_ops("cpu", "float32", "reference")):
        streams = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        fn, scale = torch.zeros(15, 24), torch.ones(3)
        _, post, comb = ops.hyper_mix(streams, fn, scale, base_of(CYCLIC), norm_eps=1e-6, hc_eps=0.0, rounds=20)
        out = ops.hyper_expand(torch.ones(2, 8), streams, post, comb)
        (gradient,) = torch.autograd.grad(out[:, 0].sum(), streams)
        results.append((comb, out, gradient))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, OP_FLOAT32)
