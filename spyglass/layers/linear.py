"""Linear maps over packed weights, and the hook through which adapters join them.

A map holds `(format, packed tensors)`; the op behind it multiplies any format. What an adapter adds is an fp32 addend
that joins before the one rounding of the output, so rows without adapter are bit-equal to a model without adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from spyglass.layers.build import BuildContext
from spyglass.layers.expert_stacks import ExpertStacks, is_quantised
from spyglass.ops.experts_grouped.adapters import ExpertAdapters
from spyglass.quant.formats import FakeQuant, Format
from spyglass.quant.packed import Packed, WeightSlot


class Adapter(Protocol):
    """What an adapter bank does for one linear map."""

    def __call__(self, x_TI: torch.Tensor, adapter_T: torch.Tensor) -> torch.Tensor | None:
        """Addend fp32 [T, out] (or [T, G, out]) for the un-rounded input; zero where `adapter_T` (int32) is 0.

        None where no row has anything to add; rank rows that are not multiplied out where the op of the map joins them.
        """
        ...


class Linear(nn.Module):
    """y = x Wᵀ + b. `adapter` is None until a bank is attached.

    `name` is the native name without `.weight`; there is a bias if the parameter table has `{name}.bias`. `rounding`
    is what the model does to the input when the stored weight is FP8 or FP4; a bf16 weight has no rounding. `fp32_out`:
    the product leaves in fp32 instead of the activation dtype (compressors, the head); so does that of the columns that
    one of several processes has, which is a summand of the output.
    """

    def __init__(
        self, build: BuildContext, name: str, *, rounding: FakeQuant | None = None, fp32_out: bool = False
    ) -> None:
        super().__init__()
        self.name = name
        param = build.param(name)
        self.out_features, self.in_features = param.shape
        self.groups = 1
        self.adapter: Adapter | None = None
        self.weight: Packed | None = None
        self.bias_O: torch.Tensor | None = None
        self.build = build
        self._has_bias = f"{name}.bias" in build.params
        self._product = build.ops.linear_block
        self._wanted_rounding = rounding
        self.rounding: FakeQuant | None = None
        is_part = param.split == "columns" and build.group.size > 1
        self.out_dtype = torch.float32 if fp32_out or is_part else build.dtype

    def slots(self) -> list[WeightSlot]:
        """The matrix and the bias, if there is one."""
        slots = [WeightSlot(self.name, (self.out_features, self.in_features), "matrix", self._put)]
        if self._has_bias:
            slots.append(WeightSlot(f"{self.name}.bias", (self.out_features,), "vector", self._put_bias))
        return slots

    def _put(self, weight: Packed) -> None:
        self.rounding = self._wanted_rounding if is_quantised(weight.format) else None
        self.weight = self.build.hold(self.name, weight)

    def _put_bias(self, bias: Packed) -> None:
        # on a GPU the matrix product adds a bias of its own dtype at no cost; widening one loses nothing either way
        on_gpu = self.build.device.type == "cuda"
        self.bias_O = bias.data.to(self.build.device, bias.data.dtype if on_gpu else torch.float32)

    @property
    def quant(self) -> FakeQuant | None:
        """The rounding of the input that what makes the input may do ahead; an adapter takes the input as it is."""
        return self.rounding if self.adapter is None and self.build.ops.rounds_ahead else None

    def forward(
        self, x_TI: torch.Tensor, adapter_T: torch.Tensor | None = None, rounded_TI: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., in] of the activation dtype to [..., out]; `adapter_T` int32 adapter per row, None = no adapters.

        `rounded_TI`: what `quant` makes of the input, where that is known.
        """
        assert self.weight is not None, f"{self.name} was never loaded"
        addend = None if self.adapter is None or adapter_T is None else self.adapter(x_TI, adapter_T)
        rounding = self.rounding
        if rounded_TI is not None and self.quant is not None:
            x_TI, rounding = rounded_TI, None
        return self._product(
            x_TI, self.weight, rounding=rounding, addend_TO=addend, bias_O=self.bias_O, out_dtype=self.out_dtype
        )

    @property
    def stack_key(self) -> tuple[Format, FakeQuant | None, torch.dtype] | None:
        """Maps of one input with the same key can lie in one stack (`MergedLinear`); None for a map that cannot."""
        weight = self.weight
        assert weight is not None, f"{self.name} was never loaded"
        if self.bias_O is not None or (weight.format.block is not None and self.out_features % weight.format.block[0]):
            return None
        return weight.format, self.rounding, self.out_dtype

    def argmax(self, x_TI: torch.Tensor, skip_O: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which output of each row is the largest, int64 [T], and its value fp32 [T]; not those that `skip_O` names.

        For a map without bias whose input is not rounded; adapters have no part in it.
        """
        assert self.weight is not None and self.bias_O is None and self.rounding is None
        return self.build.ops.linear_argmax(x_TI, self.weight, skip_O)


def common_quant(*maps: Linear) -> FakeQuant | None:
    """The rounding that all of these want of their common input, None where they differ."""
    wanted = {linear.quant for linear in maps}
    return wanted.pop() if len(wanted) == 1 else None


class GroupedLinear(nn.Module):
    """Block-diagonal map: group g of the output reads group g of the input (`wo_a`), which is never rounded (spec 4.6).

    Stored as [groups * out, in]; `out_features` counts all groups.
    """

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.name = name
        param = build.param(name)
        self.out_features, self.in_features = param.shape
        self.groups = param.groups
        self.adapter: Adapter | None = None
        self.weight: Packed | None = None
        self.build = build
        self._product = build.ops.linear_grouped

    def slots(self) -> list[WeightSlot]:
        return [WeightSlot(self.name, (self.out_features, self.in_features), "matrix", self._put)]

    def _put(self, weight: Packed) -> None:
        self.weight = self.build.hold(self.name, weight)

    def forward(self, x_TGI: torch.Tensor, adapter_T: torch.Tensor | None = None) -> torch.Tensor:
        """[T, groups, in] to [T, groups, out]."""
        assert self.weight is not None, f"{self.name} was never loaded"
        addend = None if self.adapter is None or adapter_T is None else self.adapter(x_TGI, adapter_T)
        return self._product(x_TGI, self.weight, addend_TGO=addend)


class ExpertsAdapter(Protocol):
    """What an adapter bank does for the routed experts of a layer."""

    def __call__(self) -> ExpertAdapters | None:
        """All adapters that it holds; None if there is none."""
        ...


class Experts(ExpertStacks):
    """The routed experts of a layer. `limit` and `rounding` as in `ops.experts_grouped`."""

    def __init__(self, build: BuildContext, name: str, *, limit: float, rounding: FakeQuant | None) -> None:
        super().__init__(build, name, rounding=rounding)
        self.limit = limit
        self.adapter: ExpertsAdapter | None = None
        self._product = build.ops.experts_grouped

    def forward(
        self,
        x_TC: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        adapter_T: torch.Tensor | None = None,
        stacks: Mapping[str, Packed] | None = None,
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts that are held, fp32 [T, C]; `ids_TK` int32, `weights_TK` fp32.

        `adapter_T` int32 adapter per row, None = no adapters. Rows without adapter get the same bits whoever else is
        in the step. `stacks`: a copy of them where the rows are.
        """
        adapters = None if self.adapter is None or adapter_T is None else self.adapter()
        more: dict[str, Any] = {} if adapters is None else {"adapter_T": adapter_T, "adapters": adapters}
        w1, w3, w2 = ((stacks or self.stacks)[matrix] for matrix in ("w1", "w3", "w2"))
        if len(self.held) < self.num_experts:  # the op counts from the first of the stack; -1 = no part in anything
            is_held_TK = (ids_TK >= self.held.start) & (ids_TK < self.held.stop)
            ids_TK = torch.where(is_held_TK, ids_TK - self.held.start, -1)
        return self._product(x_TC, ids_TK, weights_TK, w1, w3, w2, limit=self.limit, rounding=self.rounding, **more)

    def begin(
        self, x_TC: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, adapter_T: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        """`forward`, begun: what comes back gives its sums, and may be called once others have been launched."""
        out_TC = self(x_TC, ids_TK, weights_TK, adapter_T)
        return lambda: out_TC
