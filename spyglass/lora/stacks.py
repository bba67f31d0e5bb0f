"""Pairs for all experts of a layer at once, in the layouts that trainers write.

    PEFT's `target_parameters`   A [experts · r, in], expert slowest; B [out, r · experts], expert fastest
    packed                       A [experts, r, in], B [experts, out, r]; or both with their last two axes exchanged
    one side shared              A [r, in] or B [out, r] beside a packed other side

A packed pair stands under the name of its stack: `experts.gate_up_proj`, `down_proj`, or a matrix of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spyglass.params.hf_names import EXPERT, STACKED

LAYOUTS = (
    "read are pairs lora_A [r, in] and lora_B [out, r] of single modules, named as in the official files "
    "(layers.3.attn.wq_a, layers.3.ffn.experts.7.w1) or in Transformers (model.layers.3.self_attn.q_a_proj); and of "
    "all experts of a layer A [experts · r, in] with B [out, r · experts] (PEFT's target_parameters) or A "
    "[experts, r, in] with B [experts, out, r] under experts.gate_up_proj, experts.down_proj or experts.w1, w2, w3"
)
_NAMED = re.compile(r"(layers\.[0-9]{1,6}\.ffn\.experts)\.([a-z_0-9]+)")
_STACKS = {stack: [m for m, (s, _, _) in STACKED.items() if s == stack] for stack, _, _ in STACKED.values()}
_SINGLE = {spelling: matrix for matrix, hf in EXPERT.items() for spelling in (matrix, hf)}
# `down_proj` is both a stack and a matrix of an expert, which are the same thing
PARAMETERS: dict[str, list[str]] = {**{name: [matrix] for name, matrix in _SINGLE.items()}, **_STACKS}


@dataclass(frozen=True, slots=True)
class StackDims:
    """Of a pair for all experts: their number, what goes in, what comes out (of both matrices of `gate_up_proj`)."""

    experts: int
    inner: int
    outer: int


def named_stack(native: str) -> tuple[str, str] | None:
    """`layers.3.ffn.experts.gate_up_proj` to (`layers.3.ffn.experts`, `gate_up_proj`); None for other names."""
    found = _NAMED.fullmatch(native)
    return (found[1], found[2]) if found and found[2] in PARAMETERS else None


def stack_dims(a: Sequence[int], b: Sequence[int], rank: int, parameter: str) -> StackDims | None:
    """What the shapes of a pair mean; None if they are no layout of this rank."""
    if len(a) == len(b) == 2:
        sound = a[0] == b[1] and a[0] % rank == 0
        dims = StackDims(a[0] // rank, a[1], b[0]) if sound else None
    else:
        experts = max(shape[0] for shape in (a, b) if len(shape) == 3)
        a, b = (shape if len(shape) == 3 else (experts, *shape) for shape in (a, b))
        if _exchanged(a, b, rank):
            a, b = (a[0], a[2], a[1]), (b[0], b[2], b[1])
        dims = StackDims(experts, a[2], b[1]) if a[0] == b[0] and a[1] == b[2] == rank else None
    return dims if dims is not None and dims.outer % len(PARAMETERS[parameter]) == 0 else None


def stack_factors(a: torch.Tensor, b: torch.Tensor, rank: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [E, r, in] and B [E, out, r] of a pair that `stack_dims` understands, as views."""
    if a.dim() == b.dim() == 2:
        return a.view(experts, rank, -1), b.view(len(b), rank, experts).permute(2, 0, 1)
    a, b = (x if x.dim() == 3 else x.expand(experts, *x.shape) for x in (a, b))
    return (a.transpose(1, 2), b.transpose(1, 2)) if _exchanged(a.shape, b.shape, rank) else (a, b)


def _exchanged(a: Sequence[int], b: Sequence[int], rank: int) -> bool:
    return a[2] == b[1] == rank and not a[1] == b[2] == rank
