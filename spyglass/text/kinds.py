"""Which layers stand for all: layers of one kind launch the same kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from spyglass.config.model import LayerPlan
from spyglass.layers.build import held_tensors


def one_of_each(layers: Iterable[nn.Module], plans: Sequence[LayerPlan]) -> list[int]:
    """One layer of each kind, by plan and shapes of weights, and those whose rows or choices it uses; ascending."""
    found: dict[object, int] = {}
    for plan, layer in zip(plans, layers, strict=True):
        own = [None if source is None else source == plan.index for source in _sources(plan)]
        wired = replace(plan, index=0, kv_from=None, index_from=None, index_keys_from=None, candidates_from=None)
        weights = tuple((tuple(tensor.shape), tensor.dtype) for tensor in held_tensors(layer))
        found.setdefault((wired, *own, weights), plan.index)
    kept = set(found.values())
    while more := {source for index in kept for source in _sources(plans[index]) if source is not None} - kept:
        kept |= more
    return sorted(kept)


def _sources(plan: LayerPlan) -> tuple[int | None, ...]:
    return plan.kv_from, plan.index_from, plan.index_keys_from, plan.candidates_from
