"""A checkpoint with an adapter merged into its weights: W + scale · B A, written tensor by tensor.

Only the entry being written is in memory; what is not touched is copied through. Quantised weights have steps wider
than many an adapter's change, so what the stored values lose of it is measured, and a merge that changes next to
nothing is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from spyglass.checkpoint.layout import Spelling
from spyglass.checkpoint.match import Match, Source, match, native_tensors
from spyglass.checkpoint.safetensors import INDEX_NAME, Checkpoint, TensorHeader, open_checkpoint
from spyglass.checkpoint.save import SaveItem, save_checkpoint
from spyglass.config.json_file import read_json_object
from spyglass.config.model import ModelConfig
from spyglass.config.read import read_model_config
from spyglass.errors import AdapterError, CheckpointError
from spyglass.lora.fit import check_fit
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.peft import read_adapter
from spyglass.params.declared import AdapterGroup
from spyglass.params.hf_names import to_native
from spyglass.params.table import Param, draft_kind, draft_params, most_tensors, param_table
from spyglass.params.targets import GROUPS, group_of
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, Format
from spyglass.quant.packed import TORCH_DTYPES, Packed

MAX_UNCHANGED = 0.9  # share of values of a group's touched matrices beyond which a merge is no merge
_QUANTISATION_FIELDS = ("quantization_config", "expert_dtype")


@dataclass(slots=True)
class Loss:
    """What became of the change in one group: values in all, values stored as before, squared sizes."""

    modules: int = 0
    values: int = 0
    unchanged: int = 0
    wanted: float = 0.0
    missed: float = 0.0

    @property
    def unchanged_share(self) -> float:
        """Share of values that are what they were."""
        return self.unchanged / max(self.values, 1)

    @property
    def is_lost(self) -> bool:
        """Whether hardly anything of the change would be stored."""
        return self.unchanged_share > MAX_UNCHANGED

    @property
    def relative_error(self) -> float:
        """Size of what is missing from the change, over the size of the change."""
        return float((self.missed / self.wanted) ** 0.5) if self.wanted else 0.0

    def add(self, before: torch.Tensor, delta: torch.Tensor, after: torch.Tensor) -> None:
        """Count one matrix: its values before, the change wanted, its values as stored."""
        self.modules += 1
        self.values += before.numel()
        self.unchanged += int((after == before).sum())
        self.wanted += float(delta.double().square().sum())
        self.missed += float((after.double() - before.double() - delta.double()).square().sum())


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Losses by group of modules, in the order of `names.GROUPS`."""

    groups: dict[AdapterGroup, Loss] = field(default_factory=dict)

    @property
    def unchanged_share(self) -> float:
        values = sum(loss.values for loss in self.groups.values())
        return sum(loss.unchanged for loss in self.groups.values()) / max(values, 1)

    def __str__(self) -> str:
        lines = [
            f"{group}: {loss.modules} {'module' if loss.modules == 1 else 'modules'} merged, "
            f"{loss.unchanged_share:.1%} of values unchanged, change stored to within {loss.relative_error:.1%}"
            for group, loss in sorted(self.groups.items(), key=lambda item: GROUPS.index(item[0]))
        ]
        return "\n".join(lines)


def merge_adapter(
    model: str | Path,
    adapter: AdapterFile | str | Path,
    output: str | Path,
    *,
    format: Literal["bf16", "same"] = "bf16",
    force: bool = False,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> MergeReport:
    """Write the checkpoint `model` with an adapter (a PEFT folder) merged in to a new folder, with its other files.

    `format`: "bf16" stores every matrix in bfloat16 (engram tables stay as they are), "same" in the format it had.
    `progress` gets the bytes of each entry written.

    Raises:
        AdapterError: the adapter does not fit the model, or more than nine tenths of the values it touches in one group
            would stay as they are and `force` is not set. Nothing is left in the folder then.
        CheckpointError: the model is damaged, or the folder cannot be written.
    """
    model, output = Path(model), Path(output)
    config = read_model_config(model)
    adapter = adapter if isinstance(adapter, AdapterFile) else read_adapter(adapter, config)
    if os.path.lexists(output / "config.json"):
        raise CheckpointError(f"{output} already holds a checkpoint; choose another folder or remove it")
    checkpoint = open_checkpoint(model, most_tensors(config))
    specs = specs_of(config, checkpoint)
    check_fit(adapter, specs, config.text.n_routed_experts)
    matched = match(checkpoint, specs, skip=frozenset())
    matched.refuse_faults(model)
    work = _Merge(adapter, force)
    items = _items(matched, specs, work, format)
    save_checkpoint(output, items, names=spelling_of(checkpoint), progress=progress)
    copy_others(model, output)
    write_config(model, output, plain=format == "bf16")
    return work.report


def specs_of(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, Param]:
    """Every tensor of a checkpoint, its draft stages too if it has them."""
    specs = param_table(config)
    kind = draft_kind(native_tensors(checkpoint))
    return specs | draft_params(config, kind) if kind is not None and config.num_draft_layers else specs


def dense_delta(pair: LowRank) -> torch.Tensor:
    """scale · B A as a matrix [out, in], fp32; with an A for each group every row block of B meets its own."""
    b_GOr = pair.b_OR.float().reshape(len(pair.a_RI) // pair.rank, -1, pair.rank)
    return (pair.scale * b_GOr @ pair.a_RI.float().reshape(len(b_GOr), pair.rank, -1)).flatten(0, 1)


class _Merge:
    """The matrices as they are written, and what has been measured so far."""

    def __init__(self, adapter: AdapterFile, force: bool) -> None:
        self.report = MergeReport()
        self._adapter, self._force = adapter, force
        self._left = len(adapter.modules)

    def entry(self, name: str, source: Source, spec: Param, format: Format) -> Packed:
        """One entry as it is stored: touched, converted, or as it was."""
        found = open_entry(source, spec)
        pair = self._adapter.modules.get(name)
        if pair is None:
            return found if found.format == format else encode(decode(found, torch.float32), format)
        before, delta = decode(found, torch.float32), dense_delta(pair)
        if not delta.isfinite().all():
            raise AdapterError(
                f"what the adapter adds to {name} is too large for fp32; it is damaged, or made for nothing"
            )
        after = encode(before + delta, format)
        group = group_of(name)
        assert group is not None, name
        self.report.groups.setdefault(group, Loss()).add(before, delta, decode(after, torch.float32))
        self._left -= 1
        if self._left == 0:
            self._refuse_no_merge()
        return after

    def _refuse_no_merge(self) -> None:
        lost = [group for group in GROUPS if group in self.report.groups and self.report.groups[group].is_lost]
        if lost and not self._force:
            raise AdapterError(
                f"more than {MAX_UNCHANGED:.0%} of the values that the adapter touches in {', '.join(lost)} would "
                "stay as they are: its change is smaller than the steps of the stored format; merge to bfloat16 "
                f"(--format bf16), use the adapter unmerged, or insist (--force).\n{self.report}"
            )


def _items(matched: Match, specs: Mapping[str, Param], work: _Merge, format: Literal["bf16", "same"]) -> list[SaveItem]:
    def item(name: str, source: Source) -> SaveItem:
        spec = specs[name]
        plain = format == "bf16" and spec.kind == "matrix" and source.format.block is not None
        stored = BF16 if plain else source.format
        return SaveItem(name, spec, stored, lambda: work.entry(name, source, spec, stored))

    return [item(name, source) for name, source in matched.sources.items()]


def open_entry(source: Source, spec: Param) -> Packed:
    """The tensors of an entry, mapped and not read: a table may be larger than the memory."""
    scale = None if source.scale is None else _map(source.scale)
    return Packed(source.format, _map(source.weight), scale, spec.shape)


def _map(header: TensorHeader) -> torch.Tensor:
    """Copy-on-write, so that nothing can write to the file; torch wants memory that could be written."""
    if header.nbytes == 0:
        return torch.empty(header.shape, dtype=TORCH_DTYPES[header.dtype])
    data = np.memmap(header.file, np.uint8, "c", offset=header.start, shape=(header.nbytes,))
    return torch.from_numpy(data).view(TORCH_DTYPES[header.dtype]).view(header.shape)


def spelling_of(checkpoint: Checkpoint) -> Spelling:
    """The names that a checkpoint's files use."""
    return "native" if all(to_native(name) == name for name in checkpoint.tensors) else "hf"


def copy_others(model: Path, output: Path) -> None:
    """Tokenizer, chat templates and the like; weights and config are written anew."""
    try:
        for file in sorted(model.iterdir()):
            if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX_NAME, "config.json"):
                shutil.copyfile(file, output / file.name)
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror}") from error


def write_config(model: Path, output: Path, *, plain: bool) -> None:
    """Last, so that a folder with a config is complete; a plain one says nothing of quantisation."""
    config: dict[str, Any] = read_json_object(model / "config.json")
    if plain:
        config = {
            key: {k: v for k, v in value.items() if k not in _QUANTISATION_FIELDS} if key == "text_config" else value
            for key, value in config.items()
            if key not in _QUANTISATION_FIELDS
        }
    try:
        (output / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{output} cannot be written: {error.strerror}") from error
