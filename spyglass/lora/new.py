"""A new adapter to train: its tensors want gradients and lie in the very banks that serve."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from spyglass.checkpoint.layout import Spelling
from spyglass.errors import AdapterError
from spyglass.layers.hosted import HostedExperts
from spyglass.lora.bank import MATRICES, ExpertRows, Rows, make_rows
from spyglass.lora.fit import check_trained
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.modules import LoraTargets, find_targets
from spyglass.lora.write import write_adapter
from spyglass.params.declared import AdapterGroup
from spyglass.params.targets import check_targets

TRAINED_ADAPTER = 1  # of the adapter that is being trained; those that serve come after it


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableAdapter:
    """`parameters` fp32 leaves by `<module>.lora_A` [R, in] and `<module>.lora_B` [R, out] (B transposed).

    R is the rank; for the experts of a layer and one of their matrices (`layers.3.ffn.experts.w1`) it is experts times
    rank, expert after expert. Rows of a step that shall use it carry `adapter_id`. `counts`: modules per group.
    """

    parameters: Mapping[str, nn.Parameter]
    counts: Mapping[AdapterGroup, int]
    rank: int
    alpha: float
    rslora: bool
    targets: LoraTargets
    adapter_id: int = TRAINED_ADAPTER

    def set_dropout(self, share: float) -> None:
        """Share of the adapters' inputs that is dropped from now on: the one wanted before a step of training, 0 before
        the model is evaluated."""
        self.targets.dropout.share = share

    def swap(self, module: str, a_RI: torch.Tensor, b_RO: torch.Tensor) -> None:
        """Let the model use these tensors in place of the leaves `<module>.lora_A` and `<module>.lora_B`."""
        layer, _, matrix = module.rpartition(".")
        if layer in self.targets.experts:
            self.targets.experts_bank(layer).swap(self.adapter_id, matrix, a_RI, b_RO)
        else:
            self.targets.linear_bank(module).swap(self.adapter_id, a_RI, b_RO)

    def file(self) -> AdapterFile:
        """A copy of what was trained so far, on the host, one pair per native module."""
        modules: dict[str, LowRank] = {}
        with torch.no_grad():
            for name, a_RI in self.parameters.items():
                if not name.endswith(".lora_A"):
                    continue
                module = name.removesuffix(".lora_A")
                b_RO = self.parameters[f"{module}.lora_B"]
                pages = zip(
                    _native_names(module, self.targets), a_RI.split(self.rank), b_RO.split(self.rank), strict=True
                )
                for native, a_rI, b_rO in pages:
                    modules[native] = LowRank(
                        a_RI=a_rI.detach().cpu().clone(),
                        b_OR=b_rO.detach().cpu().T.contiguous(),
                        alpha=self.alpha,
                        rslora=self.rslora,
                    )
        return AdapterFile(modules=modules)

    def save(self, directory: str | Path, *, names: Spelling = "native", base_model: str | None = None) -> None:
        """Write it as a PEFT folder, as `lora.write.write_adapter` does.

        Raises:
            AdapterError: the folder cannot be written.
        """
        write_adapter(
            directory, self.file(), names=names, base_model=base_model, num_experts=self.targets.num_experts or None
        )

    def detach(self) -> None:
        """Take it out of the model, which is then as it was."""
        self.targets.clear(self.adapter_id)


def new_adapter(
    model: nn.Module,
    targets: Iterable[str],
    *,
    rank: int,
    alpha: float,
    rslora: bool = False,
    seed: int = 0,
) -> TrainableAdapter:
    """Add a fresh adapter to every module of the groups `targets` (see `params.targets.GROUPS`).

    A is uniform in ±1/sqrt(in), B zero, as PEFT begins: the model computes what it did before. Values depend on seed
    and module name alone.

    Raises:
        AdapterError: an unknown or untrainable group, a group of which the model has no module, a rank or alpha that
            means nothing, or a model that already holds an adapter, is divided or has experts in host memory.
    """
    groups = check_targets(targets)
    check_trained(rank, alpha)
    modules = find_targets(model)
    holders = (*modules.linears.values(), *modules.experts.values())
    if any(module.build.shard.size > 1 for module in holders):
        raise AdapterError("a divided model trains nothing; load it with tensor_parallel_size=1")
    if any(isinstance(module, HostedExperts) for module in holders):
        raise AdapterError("experts in host memory have no gradient; load the model with experts=gpu")
    if any(module.adapter is not None for module in holders):
        raise AdapterError("the model already holds an adapter; detach it before another is trained")
    empty = [group for group in groups if not modules.names(group)]
    if empty:
        raise AdapterError(
            f"0 modules matched for {', '.join(empty)}: this model has none; leave them out of the targets"
        )
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    parameters: dict[str, nn.Parameter] = {}
    counts: dict[AdapterGroup, int] = {}
    for group in groups:
        for name in modules.names(group):
            if group == "experts":
                parameters |= _experts(modules, name, rank, scale, seed)
                counts[group] = counts.get(group, 0) + len(MATRICES) * modules.experts[name].num_experts
            else:
                parameters |= _linear(modules, name, rank, scale, seed)
                counts[group] = counts.get(group, 0) + 1
    return TrainableAdapter(
        parameters=parameters, counts=counts, rank=rank, alpha=alpha, rslora=rslora, targets=modules
    )


def _linear(modules: LoraTargets, name: str, rank: int, scale: float, seed: int) -> dict[str, nn.Parameter]:
    _, inner, outer = modules.params[name].map_shape
    rows, leaves = _fresh(name, (rank, inner, outer), scale, seed, modules.device(name))
    modules.linear_bank(name).put(TRAINED_ADAPTER, rows)
    return leaves


def _experts(modules: LoraTargets, name: str, rank: int, scale: float, seed: int) -> dict[str, nn.Parameter]:
    count = modules.experts[name].num_experts
    parts: dict[str, ExpertRows] = {}
    leaves: dict[str, nn.Parameter] = {}
    for matrix in MATRICES:
        _, inner, outer = modules.params[f"{name}.0.{matrix}"].map_shape
        rows, found = _fresh(f"{name}.{matrix}", (count * rank, inner, outer), scale, seed, modules.device(name))
        parts[matrix] = ExpertRows(rows, (rank,) * count)
        leaves |= found
    modules.experts_bank(name).put(TRAINED_ADAPTER, parts)
    return leaves


def _fresh(
    name: str, shape: tuple[int, int, int], scale: float, seed: int, device: torch.device
) -> tuple[Rows, dict[str, nn.Parameter]]:
    """Rows of `shape` (R, in, out) and their leaves by name."""
    num_rows, inner, outer = shape
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    a_RI = (torch.rand((num_rows, inner), generator=generator) * 2 - 1) / math.sqrt(inner)
    a_leaf = nn.Parameter(a_RI.to(device))
    b_leaf = nn.Parameter(torch.zeros((num_rows, outer), device=device))
    rows = make_rows(a_leaf, b_leaf, [scale] * num_rows, TRAINED_ADAPTER)
    return rows, {f"{name}.lora_A": a_leaf, f"{name}.lora_B": b_leaf}


def _native_names(module: str, modules: LoraTargets) -> list[str]:
    """The modules whose rank rows a leaf holds, in order."""
    layer, _, matrix = module.rpartition(".")
    if layer not in modules.experts:
        return [module]
    return [f"{layer}.{expert}.{matrix}" for expert in range(modules.experts[layer].num_experts)]
