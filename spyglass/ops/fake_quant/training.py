"""The same values, with a straight-through gradient: rounding counts as the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spyglass.ops.fake_quant import reference
from spyglass.quant.formats import FakeQuant


def fake_quant(
    x_ND: torch.Tensor, spec: FakeQuant, *, dims: int | None = None, tail_bf16: bool = False
) -> torch.Tensor:
    """See `reference.py`. d out / d x = 1 everywhere."""

    def rounded(x_ND: torch.Tensor) -> torch.Tensor:
        if dims is not None or x_ND.shape[-1] % spec.block:
            return reference.fake_quant(x_ND, spec, dims=dims, tail_bf16=tail_bf16)
        # all blocks at once: one after another they would be most of what a GPU is asked to launch
        return reference.quantise(x_ND.float().unflatten(-1, (-1, spec.block)), spec).flatten(-2).to(x_ND.dtype)

    return straight_through(x_ND, rounded)


def straight_through(x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`rounded(x)`, of x's shape, with the gradient of x itself."""
    out: torch.Tensor = _StraightThrough.apply(x, rounded)  # type: ignore[no-untyped-call]
    return out


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounded(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
