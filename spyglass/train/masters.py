"""Master weights: every trainable number in fp32, handed to the modules as the value it will have once packed.

Each step rounds the masters to their storage format and back (FP8 blocks, FP4 blocks, bf16) and the gradient passes
straight through, so that what is trained is what the packed file says and packing loses nothing. Weights of one shape,
format and rule are one stacked tensor: few large operations instead of many small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from spyglass.layers.linear import Experts
from spyglass.model import VisionLanguageModel
from spyglass.ops.fake_quant.training import straight_through
from spyglass.params.table import Param
from spyglass.params.targets import split_expert
from spyglass.quant.codec import E4M3_MAX, encode, round_e2m1, round_e4m3
from spyglass.quant.formats import BF16, F32, Format
from spyglass.quant.packed import Packed

Rule = Literal["matrix", "other"]  # what an optimiser may do with a stack: matrices can be orthogonalised
_Group = tuple[tuple[int, ...], Format, Rule, bool]
_MIXING = "_fn"  # what hyper-connections multiply the streams with
_TABLES = ("embed", "head")  # matrices whose rows are looked up or chosen one by one


def stored_values(values: torch.Tensor, format: Format) -> torch.Tensor:
    """`decode(encode(values, format))` in fp32, without leaving the device; [..., O, I].

    The scale of a block is the least power of two with |v| / scale <= 448 (e4m3) or 6 (e2m1) (spec v4 2.4), or
    max |v| / 448 where scales are fp32.
    """
    if format.block is None:
        return values.to(torch.bfloat16).float() if format == BF16 else values.float()
    rows, columns = (min(side, length) for side, length in zip(format.block, values.shape[-2:], strict=True))
    pad = (0, -values.shape[-1] % columns, 0, -values.shape[-2] % rows)
    blocks = torch.nn.functional.pad(values.float(), pad).unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    amax = blocks.abs().amax(dim=(-3, -1), keepdim=True)
    if format.scale_dtype == "F32":
        scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    else:
        scale = _least_scale(amax, format.name == "fp4")
    rounded = (round_e2m1 if format.name == "fp4" else round_e4m3)(blocks / scale) * scale
    return rounded.flatten(-2).flatten(-3, -2)[..., : values.shape[-2], : values.shape[-1]]


def _least_scale(amax: torch.Tensor, fp4: bool) -> torch.Tensor:
    """2^e with the least e for which amax <= top · 2^e; top is 1.5 · 2^2 or 1.75 · 2^8, compared bit by bit."""
    mantissa, exponent = (0x400000, 2) if fp4 else (0x600000, 8)
    bits = amax.view(torch.int32)
    above = ((bits & 0x7FFFFF) > mantissa).to(torch.int32)
    return (((bits >> 23) - exponent + above).clamp(1, 254) << 23).view(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Weights `names` of one logical shape and format, in order: `value` fp32 [len(names), *shape]."""

    names: tuple[str, ...]
    format: Format
    rule: Rule
    value: torch.Tensor


class Masters:
    """The trainable weights of a model, and the way they reach it.

    `deliver` puts rounded values into the modules, for one forward and backward pass. What a model does not hold
    (`only_stored`) or does not learn by gradient (`fixed`: tables of experts, routing biases) is kept for the file.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        specs: Mapping[str, Param],
        initial: Callable[[str, Param], torch.Tensor],
        *,
        fixed: Sequence[str] = (),
        quantise: Callable[..., torch.Tensor] = stored_values,
    ) -> None:
        build = model.options.build
        slots = {slot.name: slot for slot in model.slots()}
        self.specs = specs
        self.fixed = {
            name: initial(name, specs[name]).to(build.device) for name in specs if _is_fixed(name, specs, fixed)
        }
        self.only_stored = {
            name: initial(name, spec) for name, spec in specs.items() if name not in slots and name not in self.fixed
        }
        self.stacks = tuple(
            Stack(
                names=names,
                format=format,
                rule=rule,
                value=torch.stack([initial(name, specs[name]).float() for name in names]).to(build.device),
            )
            for (_, format, rule, _), names in _groups(
                (name for name in slots if name not in self.fixed), specs
            ).items()
        )
        self.leaves: tuple[torch.Tensor, ...] = ()
        self._quantise = quantise
        self._dtype = build.dtype
        self._slots = slots
        self._experts = {module.name: module for module in model.modules() if isinstance(module, Experts)}
        for name in self.fixed.keys() & slots.keys():  # memory tables are no part of the model
            slots[name].put(Packed(specs[name].format, self.fixed[name], None, specs[name].shape))

    def deliver(self) -> None:
        """Hand the rounded weights to the modules; their gradients reach `leaves`.

        The leaves are new ones each time, over the same memory: a captured step may not meet the graph of another.
        """
        self.leaves = tuple(stack.value.detach().requires_grad_() for stack in self.stacks)
        for stack, leaf in zip(self.stacks, self.leaves, strict=True):
            rounded = straight_through(leaf, partial(self._quantise, format=stack.format))
            small = stack.rule == "matrix" and stack.format != F32
            self._put(stack, rounded.to(self._dtype) if small else rounded)

    def _put(self, stack: Stack, values: torch.Tensor) -> None:
        if split_expert(stack.names[0]) is not None:
            experts = self.specs[stack.names[0]].num_experts
            for first, part in zip(stack.names[::experts], values.unflatten(0, (-1, experts)), strict=True):
                found = split_expert(first)
                assert found is not None
                self._experts[found[0]].put_stack(found[2], Packed(stack.format, part, None, tuple(part.shape)))
            return
        for name, value in zip(stack.names, values.unbind(0), strict=True):
            self._slots[name].put(Packed(stack.format, value, None, tuple(value.shape)))

    def packed(self) -> dict[str, Packed]:
        """Every entry of the checkpoint as its file holds it, on the host."""
        out = {}
        for stack in self.stacks:
            for name, value in zip(stack.names, stack.value.cpu().unbind(0), strict=True):
                out[name] = encode(value, stack.format)
        for name, value in (self.fixed | self.only_stored).items():
            spec = self.specs[name]
            out[name] = (
                Packed(spec.format, value.cpu(), None, spec.shape)
                if spec.kind == "index"
                else encode(value.cpu().float(), spec.format)
            )
        return out

    def num_values(self) -> int:
        return sum(math.prod(stack.value.shape) for stack in self.stacks)


def _is_fixed(name: str, specs: Mapping[str, Param], fixed: Sequence[str]) -> bool:
    return specs[name].kind in ("index", "table") or name.endswith(tuple(fixed))


def _groups(names: Iterable[str], specs: Mapping[str, Param]) -> dict[_Group, tuple[str, ...]]:
    """Names by shape, format and rule; experts of a layer and matrix stand together, in order."""
    groups: dict[_Group, list[str]] = {}
    for name in sorted(names, key=_order):
        spec = specs[name]
        is_map = (spec.kind == "matrix" and name not in _TABLES) or name.endswith(_MIXING)
        rule: Rule = "matrix" if is_map else "other"
        key = (spec.shape, spec.format, rule, spec.split == "experts")
        groups.setdefault(key, []).append(name)
    return {key: tuple(group) for key, group in groups.items()}


def _order(name: str) -> tuple[str, str, int]:
    found = split_expert(name)
    return (name, "", 0) if found is None else (found[0], found[2], found[1])
