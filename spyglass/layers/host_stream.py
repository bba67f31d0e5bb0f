"""Experts of one layer after another, copied from host memory into places on the GPU that take turns.

While the GPU multiplies with what lies in one, the next layer comes into the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from spyglass.quant.packed import Packed, empty_packed


class Hosted(Protocol):
    """A layer whose experts lie in host memory."""

    @property
    def stacks(self) -> Mapping[str, Packed]:
        """Its three matrices of all experts."""

    @property
    def index(self) -> int:
        """The number of the layer."""


@dataclass(slots=True)
class _Place:
    """Memory for a layer. `holds` what was copied last; `copied` and `used` say when that is done, and no more read."""

    stacks: dict[str, Packed]
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    used: torch.cuda.Event = field(default_factory=torch.cuda.Event)
    holds: Hosted | None = None


class ExpertStream:
    """Not for two threads at once. The weights never change while it is in use."""

    def __init__(self, device: torch.device, places: int) -> None:
        self._device, self._most = device, places
        self._layers: Sequence[Hosted] = ()
        self._places: list[_Place] = []
        self._turn = 0
        self._copies: torch.cuda.Stream | None = None

    def prepare(self, layers: Sequence[Hosted]) -> bool:
        """Take memory for the places; False where they differ in formats, so that no place is good for all."""
        first = {name: (stack.format, stack.shape) for name, stack in layers[0].stacks.items()}
        if any({name: (s.format, s.shape) for name, s in layer.stacks.items()} != first for layer in layers):
            return False
        self._layers = layers
        self._copies = torch.cuda.Stream(self._device)
        self._places = [
            _Place({name: empty_packed(*kind, self._device) for name, kind in first.items()})
            for _ in range(min(self._most, len(layers)))
        ]
        return True

    def measure(self) -> float:
        """Seconds that a layer's copy takes."""
        best = float("inf")
        for _ in range(2):
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            self._copy(self._layers[0], self._places[0])
            self._places[0].copied.synchronize()
            best = min(best, time.perf_counter() - started)
        return best

    def expect(self, layer: int) -> None:
        """Begin the copy of the next of the layers from `layer` on, where it is not there or under way."""
        wanted = next((each for each in self._layers if each.index >= layer), None)
        if wanted is not None:
            self._find(wanted)

    def take(self, layer: Hosted) -> Mapping[str, Packed]:
        """Its experts on the GPU, for the stream at work; `done` is to be called once they are launched."""
        place = self._find(layer)
        torch.cuda.current_stream(self._device).wait_event(place.copied)
        return place.stacks

    def done(self, layer: Hosted) -> None:
        """What was launched so far is all that reads the experts of `layer`."""
        self._find(layer).used.record(torch.cuda.current_stream(self._device))

    def _find(self, layer: Hosted) -> _Place:
        place = next((each for each in self._places if each.holds is layer), None)
        if place is None:
            self._turn = (self._turn + 1) % len(self._places)
            place = self._places[self._turn]
            self._copy(layer, place)
        return place

    def _copy(self, layer: Hosted, place: _Place) -> None:
        assert self._copies is not None
        self._copies.wait_event(place.used)
        with torch.cuda.stream(self._copies), torch.inference_mode():
            for name, stack in layer.stacks.items():
                to = place.stacks[name]
                to.data.copy_(stack.data, non_blocking=True)
                if stack.scale is not None and to.scale is not None:
                    to.scale.copy_(stack.scale, non_blocking=True)
            place.copied.record(self._copies)
        place.holds = layer
