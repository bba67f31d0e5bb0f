"""Where adapters go in a model: its linear maps by native name, and the bank beside each."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.lora.bank import Dropout, ExpertsBank, LinearBank
from spyglass.lora.names import Group, group_of, split_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """`linears` by module name, `experts` by the name of their layer's experts (`layers.3.ffn.experts`)."""

    linears: dict[str, Linear | GroupedLinear] = field(default_factory=dict)
    experts: dict[str, Experts] = field(default_factory=dict)
    dropout: Dropout = field(default_factory=Dropout)

    def shape(self, name: str) -> tuple[int, int, int] | None:
        """(groups, in, out of all groups) of a module, None if the model has no such module that takes an adapter."""
        if name in self.linears:
            linear = self.linears[name]
            groups = linear.groups if isinstance(linear, GroupedLinear) else 1
            return groups, linear.spec.in_features, groups * linear.spec.out_features
        expert = split_expert(name)
        if expert is None or expert[0] not in self.experts:
            return None
        spec = self.experts[expert[0]].spec
        if expert[1] >= spec.num_experts:
            return None
        return (1, spec.width, spec.hidden) if expert[2] == "w2" else (1, spec.hidden, spec.width)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return max((experts.spec.num_experts for experts in self.experts.values()), default=0)

    def device(self, name: str) -> torch.device:
        """Where a module computes; `name` as in `linears` or `experts`."""
        return (self.linears[name] if name in self.linears else self.experts[name]).build.device

    def linear_bank(self, name: str) -> LinearBank:
        """The bank of a linear map, made if there is none."""
        linear = self.linears[name]
        if not isinstance(linear.adapter, LinearBank):
            groups = linear.groups if isinstance(linear, GroupedLinear) else 1
            linear.adapter = LinearBank(linear.build, self.dropout, groups)
        return linear.adapter

    def experts_bank(self, name: str) -> ExpertsBank:
        """The bank of a layer's experts, made if there is none."""
        experts = self.experts[name]
        if not isinstance(experts.adapter, ExpertsBank):
            experts.adapter = ExpertsBank(experts.build, self.dropout)
        return experts.adapter

    def clear(self, slot: int) -> None:
        """Take one adapter out of every bank; a module whose bank is empty is as if it never had one."""
        for place in (*self.linears.values(), *self.experts.values()):
            bank = place.adapter
            if isinstance(bank, LinearBank | ExpertsBank):
                bank.remove(slot)
                if not bank.slots:
                    place.adapter = None

    def names(self, group: Group) -> list[str]:
        """Names of the places of a group; the experts of a layer are one place."""
        if group == "experts":
            return list(self.experts)
        return [name for name in self.linears if group_of(name) == group]


def find_places(model: nn.Module) -> Places:
    """Every linear map of a model that an adapter may change."""
    places = Places()
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear) and group_of(module.spec.name) is not None:
            places.linears[module.spec.name] = module
        elif isinstance(module, Experts):
            places.experts[module.spec.name] = module
    return places
