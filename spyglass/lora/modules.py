"""Where adapters go in a model: its linear maps by native name, each with its bank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.lora.bank import MATRICES, Dropout, ExpertsBank, LinearBank
from spyglass.params.declared import AdapterGroup
from spyglass.params.table import Param


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraTargets:
    """`linears` by module name, `experts` by the name of their layer's experts (`layers.3.ffn.experts`).

    `params`: what takes an adapter, each expert's matrix by itself, whole even where this process has a part of it.
    """

    params: dict[str, Param] = field(default_factory=dict)
    linears: dict[str, Linear | GroupedLinear] = field(default_factory=dict)
    experts: dict[str, Experts] = field(default_factory=dict)
    dropout: Dropout = field(default_factory=Dropout)

    @property
    def num_experts(self) -> int:
        return max((experts.num_experts for experts in self.experts.values()), default=0)

    def device(self, name: str) -> torch.device:
        """Where a module computes; `name` as in `linears` or `experts`."""
        return (self.linears[name] if name in self.linears else self.experts[name]).build.device

    def linear_bank(self, name: str) -> LinearBank:
        """The bank of a linear map, made if there is none."""
        linear = self.linears[name]
        if not isinstance(linear.adapter, LinearBank):
            linear.adapter = LinearBank(linear.build, self.dropout, linear.groups)
        return linear.adapter

    def experts_bank(self, name: str) -> ExpertsBank:
        """The bank of a layer's experts, made if there is none."""
        experts = self.experts[name]
        if not isinstance(experts.adapter, ExpertsBank):
            experts.adapter = ExpertsBank(experts.build, self.dropout)
        return experts.adapter

    def clear(self, adapter_id: int) -> None:
        """Take one adapter out of every bank; a module whose bank is empty is as if it never had one."""
        for module in (*self.linears.values(), *self.experts.values()):
            bank = module.adapter
            if isinstance(bank, LinearBank | ExpertsBank):
                bank.remove(adapter_id)
                if not bank.adapter_ids:
                    module.adapter = None

    def names(self, group: AdapterGroup) -> list[str]:
        """Names of the targets of a group; the experts of a layer are one module."""
        if group == "experts":
            return list(self.experts)
        return [name for name in self.linears if self.params[name].adapter == group]


def find_targets(model: nn.Module) -> LoraTargets:
    """Every linear map of a model that an adapter may change."""
    targets = LoraTargets()
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            param = module.build.params[module.name]
            if param.adapter is not None:
                targets.linears[module.name], targets.params[module.name] = module, param
        elif isinstance(module, Experts):
            targets.experts[module.name] = module
            names = (f"{module.name}.{n}.{matrix}" for n in range(module.num_experts) for matrix in MATRICES)
            targets.params.update({name: module.build.params[name] for name in names})
    return targets
