"""Linear maps that share an input: in one launch where the device's kernels can, else one by one when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from spyglass.layers.linear import Linear
from spyglass.ops.linear_merged.reference import MapStack
from spyglass.quant.packed import Packed


class Projections:
    """What some linear maps make of one input, by map. What is not `known` is computed when it is asked for."""

    def __init__(
        self,
        x_TI: torch.Tensor,
        adapter_T: torch.Tensor | None,
        rounded_TI: torch.Tensor | None,
        known: dict[Linear, torch.Tensor],
    ) -> None:
        self._x_TI, self._adapter_T, self._rounded_TI, self._known = x_TI, adapter_T, rounded_TI, known

    def __getitem__(self, linear: Linear) -> torch.Tensor:
        """[..., out], as `linear(x, slots, rounded)`."""
        found = self._known.get(linear)
        if found is not None:
            return found
        out: torch.Tensor = linear(self._x_TI, self._adapter_T, self._rounded_TI)
        return out


@dataclass(frozen=True, slots=True)
class _Merged:
    """The stacks, and their maps in the order of the outputs; `weights` are what lies in them."""

    stacks: tuple[MapStack, ...]
    maps: tuple[Linear, ...]
    weights: tuple[Packed | None, ...]


class MergedLinear:
    """Some maps of one input. `stack` moves their weights into common memory, at the latest when they first meet."""

    def __init__(self, maps: Sequence[Linear]) -> None:
        self._maps = tuple(maps)
        self._build = maps[0].build
        self._merged: _Merged | None = None

    def __call__(
        self, x_TI: torch.Tensor, adapter_T: torch.Tensor | None = None, rounded_TI: torch.Tensor | None = None
    ) -> Projections:
        """`adapter_T` and `rounded_TI` as `Linear` has them. Maps with adapters are multiplied one by one."""
        known: dict[Linear, torch.Tensor] = {}
        adapted = adapter_T is not None and any(linear.adapter is not None for linear in self._maps)
        if self._build.ops.merges and not adapted and not torch.is_grad_enabled():
            merged = self.stack()
            if merged.maps:
                outputs = self._build.ops.linear_merged(x_TI, merged.stacks, rounded_TI=rounded_TI)
                known = dict(zip(merged.maps, outputs, strict=True))
        return Projections(x_TI, adapter_T, rounded_TI, known)

    def stack(self) -> _Merged:
        """The stacks of the weights that the maps have now."""
        weights = tuple([linear.weight for linear in self._maps])
        held = self._merged
        if held is None or any(now is not then for now, then in zip(weights, held.weights, strict=True)):
            groups: dict[object, list[Linear]] = {}
            for linear in self._maps:
                key = linear.stack_key
                if key is not None:
                    groups.setdefault(key, []).append(linear)
            stacks = tuple([_stack(maps) for maps in groups.values()])
            maps = tuple([linear for group in groups.values() for linear in group])
            held = self._merged = _Merged(stacks, maps, tuple([linear.weight for linear in self._maps]))
            self._build.version.bump()
        return held


def stack_weights(root: torch.nn.Module) -> None:
    """Stack the maps of one input wherever modules below `root` multiply them together; for a loaded model."""
    for module in root.modules():
        for value in vars(module).values():
            if isinstance(value, MergedLinear):
                value.stack()


def _stack(maps: Sequence[Linear]) -> MapStack:
    """One stack of all these maps, whose weights are parts of it from now on."""
    first = maps[0]
    packed = list(_weights(maps))
    weight = packed[0]
    if len(maps) > 1:
        scales = [one.scale for one in packed if one.scale is not None]
        weight = replace(
            packed[0],
            data=torch.cat([one.data for one in packed]),
            scale=torch.cat(scales) if scales else None,
            shape=(sum(one.shape[0] for one in packed), first.in_features),
        )
        ends = list(accumulate(linear.out_features for linear in maps))
        for linear, end in zip(maps, ends, strict=True):
            linear.weight = weight.rows(end - linear.out_features, end)
    return MapStack(
        weight=weight,
        sizes=tuple([linear.out_features for linear in maps]),
        rounding=first.rounding,
        out_dtype=first.out_dtype,
    )


def _weights(maps: Sequence[Linear]) -> Iterator[Packed]:
    for linear in maps:
        assert linear.weight is not None, f"{linear.name} was never loaded"
        yield linear.weight
