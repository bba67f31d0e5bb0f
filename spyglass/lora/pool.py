"""The adapters of a loaded model by name: attached, looked up and taken out again.

Everything is validated before a bank is touched. Attaching and detaching are serialised; neither may run while a step
is being computed with the adapter concerned (an engine refuses to detach one that a request uses), and an id is
never given twice, so that nothing old can meet a new adapter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spyglass.errors import AdapterError, CapacityError
from spyglass.lora.bank import MATRICES, ExpertRows, make_rows
from spyglass.lora.fit import MAX_RANK, check_alpha, check_fit
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.modules import LoraTargets, find_targets
from spyglass.lora.new import TRAINED_ADAPTER
from spyglass.lora.use import AdapterHandle
from spyglass.params.declared import AdapterGroup
from spyglass.params.targets import split_expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An adapter in the banks, and its modules per group."""

    use: AdapterHandle
    counts: Mapping[AdapterGroup, int]


class ModelBanks:
    """The banks of a model's modules, as far as this process has them: adapters by id."""

    def __init__(self, model: nn.Module) -> None:
        self.targets = find_targets(model)

    def fill(self, adapter_id: int, adapter: AdapterFile, factor: float) -> None:
        """Copy every pair that adds something into the bank of its module.

        Everything was checked before; only memory can be missing. Pairs of zeros, as before the first step of training,
        are left out: rows of adapted experts leave the fused op, whose sums run in another order, and would lose the
        bits of the base.

        Raises:
            CapacityError: there is no memory for it; nothing of it is left then.
        """
        targets = self.targets
        experts: dict[str, dict[str, dict[int, LowRank]]] = {}
        try:
            for name, pair in adapter.modules.items():
                if not (pair.a_RI.any() and pair.b_OR.any()):
                    continue
                expert = split_expert(name)
                if expert is not None:
                    experts.setdefault(expert[0], {}).setdefault(expert[2], {})[expert[1]] = pair
                    continue
                a_RI, b_RO = _held(*_shared(pair, targets, name), targets, name)
                device = targets.device(name)
                rows = make_rows(a_RI.to(device), b_RO.to(device), [pair.scale * factor] * len(a_RI), adapter_id)
                targets.linear_bank(name).put(adapter_id, rows)
            for layer, matrices in experts.items():
                held, device = targets.experts[layer].held, targets.device(layer)
                parts = {
                    matrix: _stack(matrices[matrix], held, device, adapter_id, factor)
                    for matrix in MATRICES
                    if not matrices.get(matrix, {}).keys().isdisjoint(held)
                }
                if parts:
                    targets.experts_bank(layer).put(adapter_id, parts)
        except (RuntimeError, MemoryError) as error:  # what allocators raise
            targets.clear(adapter_id)
            raise CapacityError(f"the adapter does not fit into the memory beside the model: {error}") from error

    def clear(self, adapter_id: int) -> None:
        self.targets.clear(adapter_id)


class AdapterPool:
    """Adapters of one model. Its methods may be called from any thread."""

    def __init__(self, model: nn.Module, *, max_rank: int = MAX_RANK, banks: ModelBanks | None = None) -> None:
        self._banks = ModelBanks(model) if banks is None else banks
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._attached: dict[str, Attached] = {}
        self._next_id = TRAINED_ADAPTER + 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._attached)

    def adapter_ids(self) -> list[int]:
        return [self.use(name).adapter_id for name in self.names]

    def use(self, name: str) -> AdapterHandle:
        """What a request with this adapter carries.

        Raises:
            AdapterError: no adapter has this name; the known ones are listed.
        """
        return self[name].use

    def __getitem__(self, name: str) -> Attached:
        """Raises AdapterError as `use`."""
        found = self._attached.get(name)
        if found is None:
            raise AdapterError(f"there is no adapter {name!r}; known are: {', '.join(self._attached) or 'none'}")
        return found

    def attach(self, name: str, adapter: AdapterFile, *, factor: float = 1.0) -> AdapterHandle:
        """Put an adapter into the banks; `factor` multiplies what it adds.

        Raises:
            AdapterError: the name is taken, the adapter does not fit the model, a rank is above the limit, or `factor`
                is nothing to multiply with.
            CapacityError: there is no memory for it. The model is as it was in all these cases.
        """
        try:
            check_alpha(factor)
        except AdapterError as error:
            raise AdapterError(f"factor is no factor: {error}") from error
        targets = self._banks.targets
        check_fit(adapter, targets.params, targets.num_experts, self._max_rank)
        text_digest, vision_digest = adapter.digests(factor)
        with self._lock:
            if name in self._attached:
                raise AdapterError(f"an adapter {name!r} is already there; detach it, or choose another name")
            use = AdapterHandle(adapter_id=self._next_id, text_digest=text_digest, vision_digest=vision_digest)
            self._next_id += 1
            self._banks.fill(use.adapter_id, adapter, factor)
            self._attached = {**self._attached, name: Attached(use=use, counts=adapter.counts())}
        return use

    def detach(self, name: str) -> None:
        """Take an adapter out of every bank and give its memory back.

        Raises:
            AdapterError: as `use`.
        """
        self.free(self.unregister(name))

    def unregister(self, name: str) -> AdapterHandle:
        """Take the name away, at once. Who uses the adapter may go on until `free` takes its memory.

        Raises:
            AdapterError: as `use`.
        """
        with self._lock:
            use = self.use(name)
            self._attached = {other: found for other, found in self._attached.items() if other != name}
        return use

    def free(self, use: AdapterHandle) -> None:
        """Free the memory of an unregistered adapter that no request uses."""
        with self._lock:
            self._banks.clear(use.adapter_id)


def _shared(pair: LowRank, targets: LoraTargets, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank rows fp32 A [R, in] and B [R, out]. An A for each group is a shared one whose B is zero in other groups."""
    a_RI = pair.a_RI.to(torch.float32, copy=True)
    b_RO = pair.b_OR.T.to(torch.float32, copy=True).contiguous()
    if len(a_RI) == pair.rank:
        return a_RI, b_RO
    groups = targets.params[name].groups
    eye_GG = torch.eye(groups)[:, None, :, None]
    b_rGO = b_RO.view(pair.rank, groups, -1)
    return a_RI, (eye_GG * b_rGO).reshape(len(a_RI), -1)


def _held(a_RI: torch.Tensor, b_RO: torch.Tensor, targets: LoraTargets, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank rows as far as they belong to what this process has of the matrix: its rows of W B's, its columns A's."""
    cut = targets.linears[name].build.shard.cut(targets.params[name])
    if cut is None:
        return a_RI, b_RO
    part = slice(cut.start, cut.stop)
    return (a_RI, b_RO[:, part].contiguous()) if cut.axis == 0 else (a_RI[:, part].contiguous(), b_RO)


def _stack(
    found: Mapping[int, LowRank], held: range, device: torch.device, adapter_id: int, factor: float
) -> ExpertRows:
    """Rank rows of one matrix, held expert after expert, in the dtype of the file: these may be gigabytes."""
    present: Sequence[LowRank] = [found[expert] for expert in held if expert in found]
    ranks = tuple(found[expert].rank if expert in found else 0 for expert in held)
    a_RI = torch.cat([pair.a_RI for pair in present]).to(device)
    b_RO = torch.cat([pair.b_OR.T for pair in present]).to(device)
    scales = [pair.scale * factor for pair in present for _ in range(pair.rank)]
    return ExpertRows(make_rows(a_RI, b_RO, scales, adapter_id), ranks)
