"""Adapters made in memory, and the dense weights they stand for: W + scale · B A, computed here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.names import group_of
from spyglass.quant.codec import decode
from spyglass.quant.formats import F32
from spyglass.quant.packed import Packed


def modules_of(shapes: Mapping[str, tuple[int, ...]], groups: Iterable[str]) -> list[str]:
    """Names of a model's matrices (by slot name) that belong to some of the groups."""
    wanted = set(groups)
    return [name for name in shapes if group_of(name) in wanted]


def random_adapter(
    shapes: Mapping[str, tuple[int, ...]],
    groups: Iterable[str],
    *,
    rank: int = 3,
    alpha: float = 4.0,
    seed: int = 0,
    rslora: bool = False,
    size: float = 0.5,
    dtype: torch.dtype = torch.float32,
) -> AdapterFile:
    """A pair for every matrix of the groups; `size` is about that of the change beside a weight of ordinary size."""
    modules = {}
    for name in modules_of(shapes, groups):
        out, inner = shapes[name]
        source = np.random.default_rng([seed, rank, *name.encode()])
        a = source.normal(size=(rank, inner)) * inner**-0.5
        b = source.normal(size=(out, rank)) * size * rank**0.5 / alpha
        modules[name] = LowRank(
            a_RI=torch.from_numpy(a).to(dtype), b_OR=torch.from_numpy(b).to(dtype), alpha=alpha, rslora=rslora
        )
    return AdapterFile(modules=modules)


def merged(weights: Mapping[str, Packed], adapter: AdapterFile, factor: float = 1.0) -> dict[str, Packed]:
    """The weights with the adapter added, in float32."""
    out = dict(weights)
    for name, pair in adapter.modules.items():
        delta = pair.scale * factor * (pair.b_OR.double() @ shared_a(pair).double())
        dense = decode(out[name], torch.float32).double()
        out[name] = Packed(F32, (dense + delta).float(), None, out[name].shape)
    return out


def shared_a(pair: LowRank) -> torch.Tensor:
    assert len(pair.a_RI) == pair.rank, "an A for each group has no dense product"
    return pair.a_RI


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Logical shapes of a model's matrices by slot name."""
    return {slot.name: slot.shape for slot in model.slots() if slot.kind == "matrix"}
