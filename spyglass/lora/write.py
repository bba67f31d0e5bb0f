"""PEFT folders out, in official names or in Transformers'.

Transformers stacks the routed experts of a layer, so there their pairs become one pair per stacked tensor
(`target_parameters`). gate_up_proj has one A for both of its halves: where w1 and w3 have their own, the rank rows of
both lie in it and B is zero where they do not meet, which is the same sum.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from spyglass.checkpoint.layout import Spelling
from spyglass.errors import AdapterError
from spyglass.lora.config import CONFIG_NAME
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.peft import TENSORS_NAME
from spyglass.params.hf_names import to_hf
from spyglass.params.targets import split_expert

_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Written:
    """A pair under the name its rank is looked up by, and the name of its tensors, which differs for a stack.

    The rank of a stack is that of one expert.
    """

    name: str
    module: str
    pair: LowRank
    rank: int

    def alpha(self, *, rslora: bool) -> float:
        """Alpha for a config that does or does not divide by the root of the rank."""
        if self.pair.rslora == rslora:
            return self.pair.alpha
        return self.pair.alpha * math.sqrt(self.rank) ** (1 if self.pair.rslora else -1)


def write_adapter(
    directory: str | Path,
    adapter: AdapterFile,
    *,
    names: Spelling = "native",
    base_model: str | None = None,
    num_experts: int | None = None,
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`; values keep their dtype.

    `names`: "native" are the official ones, "hf" those of Transformers, which need `num_experts` where routed experts
    are adapted. `base_model` is noted in the config. Existing files of those names are replaced.

    Raises:
        AdapterError: the adapter is empty, or the folder cannot be written.
    """
    if not adapter.modules:
        raise AdapterError("an adapter without modules cannot be written; 0 modules matched")
    written = list(_native(adapter) if names == "native" else _transformers(adapter, num_experts))
    tensors: dict[str, torch.Tensor] = {}
    for item in written:
        tensors[f"{_PREFIX}{item.module}.lora_A.weight"] = _own(item.pair.a_RI)
        tensors[f"{_PREFIX}{item.module}.lora_B.weight"] = _own(item.pair.b_OR)
    config = _config(written, base_model)
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _replacing(directory / TENSORS_NAME) as path:
            path.write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))  # its own files are private
        with _replacing(directory / CONFIG_NAME) as path:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise AdapterError(f"{directory} cannot be written: {error.strerror or error}") from error


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: the library refuses tensors that share memory, as parts of a stack do."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _native(adapter: AdapterFile) -> Iterator[_Written]:
    for name, pair in adapter.modules.items():
        yield _Written(name, name, pair, pair.rank)


def _transformers(adapter: AdapterFile, num_experts: int | None) -> Iterator[_Written]:
    layers: dict[str, dict[tuple[int, str], LowRank]] = {}
    for name, pair in adapter.modules.items():
        expert = split_expert(name)
        if expert is None:
            yield _Written(to_hf(name), to_hf(name), pair, pair.rank)
        else:
            layers.setdefault(expert[0], {})[expert[1], expert[2]] = pair
    for layer, pairs in layers.items():
        assert num_experts is not None, "stacked experts need to know how many a layer has"
        module = to_hf(f"{layer}.0.w1").removesuffix(".0.gate_proj")
        stacks = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        found = {n: _stack(pairs, matrices, num_experts) for n, matrices in stacks.items()}
        both = all(found.values())
        for name, stacked in found.items():
            if stacked is not None:
                inside = ".base_layer" if both and name == "gate_up_proj" else ""
                yield _Written(f"{module}.{name}", f"{module}{inside}", stacked, stacked.rank // num_experts)


def _stack(pairs: Mapping[tuple[int, str], LowRank], matrices: tuple[str, ...], experts: int) -> LowRank | None:
    """One pair for a stacked tensor: experts that have none get zeros, smaller ranks are filled up with zeros."""
    own = {key: pair for key, pair in pairs.items() if key[1] in matrices}
    if not own:
        return None
    first = next(iter(own.values()))
    joined = [_join([pairs.get((expert, matrix)) for matrix in matrices], first) for expert in range(experts)]
    rank = max(len(a) for a, _ in joined)
    a_EsI = first.a_RI.new_zeros(experts, rank, first.a_RI.shape[1])
    b_OsE = first.b_OR.new_zeros(len(matrices) * len(first.b_OR), rank, experts)
    for expert, (a_sI, b_Os) in enumerate(joined):
        a_EsI[expert, : len(a_sI)] = a_sI
        b_OsE[:, : len(a_sI), expert] = b_Os
    alpha = first.scale * (math.sqrt(rank) if first.rslora else rank)
    return LowRank(a_RI=a_EsI.flatten(0, 1), b_OR=b_OsE.flatten(1), alpha=alpha, rslora=first.rslora)


def _join(pairs: list[LowRank | None], first: LowRank) -> tuple[torch.Tensor, torch.Tensor]:
    """A [s, in] and B [halves · out, s] of one expert; an A that all halves share is kept once."""
    present = [(half, pair) for half, pair in enumerate(pairs) if pair is not None]
    shared = len(present) == len(pairs) and all(torch.equal(pair.a_RI, present[0][1].a_RI) for _, pair in present)
    outer = len(first.b_OR)
    a_parts, b_parts = [], []
    for half, pair in present:
        b_hOs = pair.b_OR.new_zeros(len(pairs), outer, pair.rank)
        b_hOs[half] = pair.b_OR * (pair.scale / first.scale)
        a_parts.append(pair.a_RI)
        b_parts.append(b_hOs.flatten(0, 1))
    if not present:
        return first.a_RI[:0], first.b_OR.new_zeros(len(pairs) * outer, 0)
    if shared:
        return a_parts[0], torch.stack(b_parts).sum(dim=0)
    return torch.cat(a_parts), torch.cat(b_parts, dim=1)


def _config(written: list[_Written], base_model: str | None) -> dict[str, Any]:
    """What PEFT needs to build the same pairs: the commonest rank and alpha, and patterns for the others."""
    rslora = all(item.pair.rslora for item in written)
    alphas = [item.alpha(rslora=rslora) for item in written]
    rank = Counter(item.rank for item in written).most_common(1)[0][0]
    alpha = Counter(alphas).most_common(1)[0][0]
    named = list(zip(written, alphas, strict=True))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "use_rslora": rslora,
        "rank_pattern": {item.name: item.rank for item in written if item.rank != rank},
        "alpha_pattern": {item.name: _whole(a) for item, a in named if a != alpha},
        "target_modules": [item.name for item in written if item.name == item.module],
        "target_parameters": [item.name for item in written if item.name != item.module] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _whole(alpha: float) -> float | int:
    return int(alpha) if alpha == int(alpha) else alpha


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A new file that takes the place of `path` when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
