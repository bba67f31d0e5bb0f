"""The optimiser of whole-model training: matrices by orthogonalised momentum, everything else by Adam.

Matrices (Jordan et al. 2024, scaled as by Liu et al. 2025): m <- mu m + g; u = UVᵀ of mu m + g, by five Newton-Schulz
steps; w <- w (1 - lr decay) - lr · 0.2 sqrt(max(out, in)) u, so that an update has the usual size of Adam's. Adam as
published, without decay. Nothing is read back to the host: rate and step number are tensors, so that a step can be
captured. Momentum is held in bf16, as it is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spyglass.train.masters import Stack

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5
_SIZE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """`momentum` of matrices, `betas` and `eps` of Adam, `decay` of matrices, `other_rate`: Adam's rate over theirs."""

    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-10
    decay: float = 0.05
    other_rate: float = 0.5
    clip: float = 1.0


def orthogonalise(matrix_NOI: torch.Tensor) -> torch.Tensor:
    """About UVᵀ of each matrix U S Vᵀ: singular values between 0.7 and 1.2; bf16 products on a GPU."""
    a, b, c = _COEFFICIENTS
    dtype = torch.bfloat16 if matrix_NOI.is_cuda else torch.float32
    tall = matrix_NOI.shape[-2] > matrix_NOI.shape[-1]
    x = matrix_NOI.mT if tall else matrix_NOI
    x = (x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    """State and step; `state` are named tensors to save and to restore in place."""

    def __init__(self, stacks: Sequence[Stack], settings: MuonSettings) -> None:
        self.stacks, self.settings = stacks, settings
        device = stacks[0].value.device
        self.rate = torch.zeros((), device=device)
        self.state: dict[str, torch.Tensor] = {"number": torch.zeros((), device=device)}
        for index, stack in enumerate(stacks):
            self.state[f"first.{index}"] = torch.zeros_like(stack.value, dtype=torch.bfloat16)
            if stack.rule == "other":
                self.state[f"second.{index}"] = torch.zeros_like(stack.value)

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], count: torch.Tensor) -> torch.Tensor:
        """One update from the stacks' gradients, summed over `count` targets; their norm before clipping.

        A stack without gradient is left alone. A gradient that is not finite makes no update at all.
        """
        live = [(index, grad / count) for index, grad in enumerate(gradients) if grad is not None]
        norm = torch.stack([gradient.float().square().sum() for _, gradient in live]).sum().sqrt()
        finite = torch.isfinite(norm)
        factor = torch.where(finite, (self.settings.clip / (norm + 1e-6)).clamp(max=1.0), 0.0)
        self.state["number"].add_(finite)
        rate = self.rate * finite
        for index, gradient in live:
            stack, gradient = self.stacks[index], torch.where(finite, gradient * factor, 0.0)
            if stack.rule == "matrix":
                self._matrix(index, stack, gradient, rate)
            else:
                self._adam(index, stack, gradient, rate * self.settings.other_rate)
        return norm

    def _matrix(self, index: int, stack: Stack, gradient: torch.Tensor, rate: torch.Tensor) -> None:
        settings, first = self.settings, self.state[f"first.{index}"]
        first.copy_(first.float() * settings.momentum + gradient)
        update = orthogonalise(gradient + settings.momentum * first.float())
        size = _SIZE * max(stack.value.shape[-2:]) ** 0.5
        stack.value.mul_(1 - rate * settings.decay).sub_(rate * size * update)

    def _adam(self, index: int, stack: Stack, gradient: torch.Tensor, rate: torch.Tensor) -> None:
        (beta1, beta2), number = self.settings.betas, self.state["number"]
        first, second = self.state[f"first.{index}"], self.state[f"second.{index}"]
        first.copy_(first.float() * beta1 + gradient * (1 - beta1))
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean, square = first.float() / (1 - beta1**number), second / (1 - beta2**number)
        stack.value.sub_(rate * mean / (square.sqrt() + self.settings.eps))
