"""The routed experts of a layer as weights: three stacks, filled expert by expert."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from spyglass.errors import CheckpointError
from spyglass.layers.build import BuildContext
from spyglass.quant.formats import FakeQuant, Format
from spyglass.quant.packed import Packed, WeightSlot, empty_packed
from spyglass.quant.tiles import can_tile, tile


class ExpertStacks(nn.Module):
    """Stacks w1, w3 [E, F, C] and w2 [E, C, F] of a layer, filled expert by expert; see `layers.linear.Experts`.

    Of all `num_experts` these are those that this process has, `held`; the sums of all processes make the whole.

    `name` is the native name up to the expert's number; `rounding` of the inputs of products with weights as these.
    """

    def __init__(self, build: BuildContext, name: str, *, rounding: FakeQuant | None) -> None:
        super().__init__()
        self.name = name
        self.num_experts = build.params[f"{name}.0.w1"].num_experts
        self.held = range(*build.shard.span(self.num_experts))
        self.stacks: dict[str, Packed] = {}
        self.build = build
        self._wanted_rounding, self.rounding = rounding, rounding
        self._found: tuple[str, Format] | None = None

    def slots(self) -> list[WeightSlot]:
        shapes = {name: self.build.params[f"{self.name}.0.{name}"].shape for name in ("w1", "w3", "w2")}
        return [
            WeightSlot(
                f"{self.name}.{expert}.{name}",
                shape,
                "matrix",
                partial(self._put, name, expert),
                place=partial(self._place, name, expert, shape),
            )
            for expert in self.held
            for name, shape in shapes.items()
        ]

    def _place(self, name: str, expert: int, shape: tuple[int, ...], format: Format) -> Packed | None:
        """The expert's part of the stack, for a loader to read into; None if the stack is not what the file holds."""
        if self.build.device.type != "cpu" or self.build.expand:
            return None
        if name not in self.stacks:
            self.stacks[name] = self._empty(format, (len(self.held), *shape))
        return self.stacks[name][expert - self.held.start]

    def _empty(self, format: Format, shape: tuple[int, ...]) -> Packed:
        return empty_packed(format, shape, self.build.device)

    def _put(self, name: str, expert: int, weight: Packed) -> None:
        full_name = f"{self.name}.{expert}.{name}"
        if self._found is None:
            self._find(full_name, weight.format)
        assert self._found is not None
        first_name, first_format = self._found
        if weight.format != first_format:
            raise CheckpointError(
                f"{full_name} is stored as {_describe(weight.format)} but {first_name} as {_describe(first_format)}; "
                "all routed experts of a layer must have one format: convert them to one"
            )
        held = self.build.hold(full_name, weight)
        if self.build.device.type == "cuda" and self.build.ops.chosen["experts_grouped"] == "triton" and can_tile(held):
            held = tile(held)
        if name not in self.stacks:
            empty = self._empty(held.format, (len(self.held), *held.shape))
            self.stacks[name] = replace(empty, tiled=held.tiled)
        stack = self.stacks[name][expert - self.held.start]
        if stack.data.data_ptr() == held.data.data_ptr():
            return  # it was read into its place
        stack.data.copy_(held.data)
        if stack.scale is not None and held.scale is not None:
            stack.scale.copy_(held.scale)

    def put_stack(self, name: str, weight: Packed) -> None:
        """Take over a whole stack [E, out, in] as it is, instead of expert by expert (a trainer's weights)."""
        self._find(f"{self.name}.*.{name}", weight.format)
        self.stacks[name] = weight
        self.build.version.bump()

    def _find(self, full_name: str, format: Format) -> None:
        self._found = full_name, format
        self.rounding = self._wanted_rounding if is_quantised(format) else None


def is_quantised(format: Format) -> bool:
    """FP8 and FP4 weights, whose linear maps round their input."""
    return format.name in ("fp8", "fp4")


def _describe(format: Format) -> str:
    return format.name if format.block is None else f"{format.name} with {format.block[0]}x{format.block[1]} blocks"
