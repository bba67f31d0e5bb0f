"""Adapters made in memory, and the dense weights they stand for: W + scale · B A, computed here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spyglass.config.model import ModelConfig
from spyglass.engine.engine import Engine
from spyglass.engine.request import SamplingParams
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.use import AdapterHandle
from spyglass.params.targets import group_of
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from spyglass.quant.codec import decode
from spyglass.quant.formats import F32
from spyglass.quant.packed import Packed
from tests import engine_parts, small_v41
from tests.small_models import build_model, empty_model, random_weights


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


@dataclass(frozen=True, kw_only=True)
class Small:
    """A small random model of a family, and how to build it again with other weights."""

    family: str
    config: ModelConfig
    weights: Mapping[str, Packed]

    def model(self, weights: Mapping[str, Packed] | None = None, **options: Any) -> Any:
        return build_model(self.config, self.weights if weights is None else weights, **options)

    def engine(self, model: Any, **options: Any) -> Engine:
        if self.family == "v41":
            return small_v41.make_engine(model, **options)
        return engine_parts.make_engine(model, self.config, **options)

    def prompt(self, parts: Sequence[int | tuple[int, int]], seed: int = 0) -> Prompt:
        return prompt_from_parts(engine_parts.mixed_parts(parts, seed), self.config)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: packed.shape for name, packed in self.weights.items() if len(packed.shape) == 2}


def small(family: str, seed: int = 0, *, packed: bool = False) -> Small:
    """V4 (`v4`) or V4.1 (`v41`), with a tower."""
    config = small_v41.small_v41_config() if family == "v41" else engine_parts.engine_config()
    return Small(family=family, config=config, weights=random_weights(empty_model(config).slots(), seed, packed))


def logits_together(engine: Engine, requests: Sequence[tuple[Prompt, AdapterHandle]]) -> list[torch.Tensor]:
    """Logits [T, V] of every position of requests that run together, each with its adapter."""
    sinks = [torch.full((len(prompt), engine.vocab_size), float("nan")) for prompt, _ in requests]
    for (prompt, use), sink in zip(requests, sinks, strict=True):
        engine.add(prompt, SamplingParams(max_tokens=0), sink=sink, adapter=use)
    while engine.has_work:
        engine.step()
    return sinks
