"""Quantise-dequantise of activations along the last axis, in blocks (spec v4 2.5, v41 4.1)."""

from __future__ import annotations

import torch

from spyglass.quant.codec import ceil_pow2_scale, round_e2m1, round_e4m3
from spyglass.quant.formats import FakeQuant

_FLOOR = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}
_TOP = {"e4m3": 448.0, "e2m1": 6.0}


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
    top, amax = _TOP[spec.element], x.abs().amax(dim=-1, keepdim=True)
    if spec.scale == "e8m0":
        scale = ceil_pow2_scale(amax.clamp(min=_FLOOR[spec.element]), 1.0 / top)
    else:
        scale = round_e4m3((amax.clamp(min=6 * 2.0**-9) / 6).clamp(max=448.0))
    code = (x / scale).clamp(-top, top)
    return (round_e4m3(code) if spec.element == "e4m3" else round_e2m1(code)) * scale
