"""Rotary tables: angle = fp32(position) · fp32(frequency), cosine and sine in fp32 (spec v4 4.3).

A float64 angle would be more exact and disagree with the released model at long positions, so everything is fp32.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch


class Scaling(Protocol):
    """YaRN numbers, as `config.model.YarnScaling` has them."""

    @property
    def factor(self) -> float: ...
    @property
    def original_max_position(self) -> int: ...
    @property
    def beta_fast(self) -> float: ...
    @property
    def beta_slow(self) -> float: ...


def rope_frequencies(theta: float, dim: int, yarn: Scaling | None) -> torch.Tensor:
    """f_i = theta^(-2i / dim) for i < dim / 2, fp32, slowed by YaRN where given; no attention temperature.

    YaRN: f_i <- (f_i / factor) ramp_i + f_i (1 - ramp_i) with ramp_i = clamp((i - low) / (high - low), 0, 1), where low
    and high are the pairs that turn beta_fast and beta_slow times over the original length.
    """
    frequency_R = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return frequency_R
    low = max(math.floor(_pair_of(yarn.beta_fast, theta, dim, yarn)), 0)
    high: float = min(math.ceil(_pair_of(yarn.beta_slow, theta, dim, yarn)), dim - 1)
    if low == high:
        high += 0.001
    ramp_R = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequency_R / yarn.factor * ramp_R + frequency_R * (1 - ramp_R)


def _pair_of(turns: float, theta: float, dim: int, yarn: Scaling) -> float:
    """The (fractional) pair that turns `turns` times over the original length."""
    return dim * math.log(yarn.original_max_position / (2 * math.pi * turns)) / (2 * math.log(theta))


class Rope:
    """One rotary table; layers with equal parameters share one."""

    def __init__(self, theta: float, dim: int, yarn: Scaling | None, device: torch.device) -> None:
        self.frequency_R = rope_frequencies(theta, dim, yarn).to(device)

    def tables(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, fp32 [T, dim / 2], of integer positions."""
        angle_TR = positions_T.to(torch.float32)[:, None] * self.frequency_R
        return angle_TR.cos(), angle_TR.sin()
