"""Decode steps whose kernel calls are kept on a tape, and made again for steps of the same shape.

A layer takes its ways by shapes and by numbers on the host, so these are what a tape is kept under; whatever is a
tensor may differ. So that few tapes serve many steps, numbers that are only bounds are widened, and when groups of some
sequences close, entries of all others are computed too, from any row, and written nowhere.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from spyglass.batch.types import Batch, CacheView, PoolStep
from spyglass.config.model import TextConfig
from spyglass.layers.build import held_tensors
from spyglass.ops.tape import Recorder, Tape
from spyglass.text.step import Step

_MOST_ROWS = 64  # of a step that is kept: in larger ones the kernels take the time
_MOST_TAPES = 32
_BOUND = 64  # what the number of visible entries is rounded up to

Layers = Callable[[torch.Tensor, Step, CacheView], torch.Tensor]


class KeptSteps:
    """The tapes of one backbone, least recently used first. A step is recorded when its like comes a second time."""

    def __init__(self, recorder: Recorder, text: TextConfig, layers: nn.Module) -> None:
        self._recorder, self._text, self._layers = recorder, text, layers
        self._tapes: OrderedDict[tuple[Any, ...], Tape | None] = OrderedDict()
        self._getters: dict[type, Any] = {}
        self._one_at_a_time = threading.Lock()
        self.replays = 0  # steps that came from a tape

    def fits(self, batch: Batch) -> bool:
        """Whether steps like this are kept: one row per sequence, no pictures, adapters, memory tables or gradients."""
        rows = len(batch.ids_T)
        return (
            len(batch.seq_len_S) == rows <= _MOST_ROWS
            and batch.window_width <= self._text.sliding_window
            and batch.slot_T is None
            and not (batch.has_pictures or batch.capture or batch.engram_rows or torch.is_grad_enabled())
        )

    def widened(self, batch: Batch, cache: CacheView) -> tuple[Batch, CacheView]:
        """A step that fits, with bounds that are those of many steps."""
        pools = {ratio: _widened(pool, len(batch.ids_T), self._text.index_topk) for ratio, pool in cache.pools.items()}
        return replace(batch, window_width=self._text.sliding_window), replace(cache, pools=pools)

    def run(self, layers: Layers, streams_TMC: torch.Tensor, step: Step, cache: CacheView) -> torch.Tensor:
        """`layers` of a widened step."""
        if not self._one_at_a_time.acquire(blocking=False):
            return layers(streams_TMC, step, cache)
        try:
            inputs: list[torch.Tensor] = []
            facts: list[Any] = [torch.get_num_threads()]
            for part in (streams_TMC, step, cache):
                _take_apart(part, inputs, facts, self._getters)
            pointers = [tensor.data_ptr() for tensor in inputs]
            key = (*facts, *_same(pointers))
            tape = self._tapes.get(key)
            if tape is not None:
                self._tapes.move_to_end(key)
                self.replays += 1
                return tape.replay(pointers).clone()
            if key not in self._tapes:
                self._tapes[key] = None
                if len(self._tapes) > _MOST_TAPES:
                    self._tapes.popitem(last=False)
                return layers(streams_TMC, step, cache)
            weights = list(held_tensors(self._layers))
            out, self._tapes[key] = self._recorder.record(lambda: layers(streams_TMC, step, cache), inputs, weights)
            return out
        finally:
            self._one_at_a_time.release()


def _widened(pool: PoolStep, rows: int, topk: int) -> PoolStep:
    visible = -(-pool.max_visible // _BOUND) * _BOUND
    if pool.max_visible <= topk:
        visible = min(visible, topk)  # beyond it a choice is made
    absent = rows - len(pool.write_P)
    if absent in (0, rows):
        return replace(pool, max_visible=visible)
    return replace(
        pool,
        max_visible=visible,
        sources_PB=torch.cat([pool.sources_PB, pool.sources_PB.new_zeros(absent, pool.sources_PB.shape[1])]),
        positions_P=torch.cat([pool.positions_P, pool.positions_P.new_zeros(absent)]),
        write_P=torch.cat([pool.write_P, pool.write_P.new_full((absent,), -1)]),
    )


def _take_apart(part: Any, tensors: list[torch.Tensor], facts: list[Any], getters: dict[type, Any]) -> None:
    """All tensors of a step's data, and everything else about it; `getters` give the fields of known classes."""
    if isinstance(part, torch.Tensor):
        tensors.append(part)
        facts += (part.shape, part.dtype, part.is_contiguous() or part.stride())
    elif isinstance(part, Mapping):
        facts += part
        for value in part.values():
            _take_apart(value, tensors, facts, getters)
    elif isinstance(part, tuple | list):
        for value in part:
            _take_apart(value, tensors, facts, getters)
    elif is_dataclass(part):
        if type(part) not in getters:
            getters[type(part)] = attrgetter(*(field.name for field in fields(part)))
        for value in getters[type(part)](part):
            _take_apart(value, tensors, facts, getters)
    else:
        facts.append(part)


def _same(pointers: list[int]) -> list[int]:
    """Which inputs lie in the same place: the first of them, for each."""
    first: dict[int, int] = {}
    return [first.setdefault(pointer, number) for number, pointer in enumerate(pointers)]
