"""Quantise-dequantise of activations along the last axis, in blocks (spec v4 2.5, v41 4.1)."""

from __future__ import annotations

import torch

from spyglass.quant.formats import FakeQuant
from spyglass.quant.rows import code_and_scale


def fake_quant(
    x_ND: torch.Tensor, spec: FakeQuant, *, dims: int | None = None, tail_bf16: bool = False
) -> torch.Tensor:
    """round_element(clamp(x / σ)) · σ per block of the first `dims` channels (all when None), in x's dtype.

    e8m0: σ = 2^⌈log2(max(amax, floor) · fp32(1 / top))⌉; e4m3 (scale): σ = e4m3(max(amax, 6 · 2^-9) / 6). A last
    block shorter than `spec.block` is taken as it is. Channels behind `dims` pass unchanged, or rounded to bf16 with
    `tail_bf16`.
    """
    dims = x_ND.shape[-1] if dims is None else dims
    head, tail = x_ND[..., :dims], x_ND[..., dims:]
    if tail_bf16:
        tail = tail.to(torch.bfloat16).to(x_ND.dtype)
    blocks = [quantise(block, spec) for block in head.float().split(spec.block, dim=-1)] if dims else []
    return torch.cat([torch.cat(blocks, dim=-1).to(x_ND.dtype), tail], dim=-1) if blocks else tail


def quantise(x: torch.Tensor, spec: FakeQuant) -> torch.Tensor:
    """Blocks of fp32 values along the last axis, one scale each, to the values they are stored as."""
    code, scale = code_and_scale(x, spec)
    return code * scale
