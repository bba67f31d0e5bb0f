"""Where routed experts lie when a GPU has no room for all: whole layers' in host memory, and what steps then cost.

Torch-free, from headers alone. What lies on the host is computed there for steps of few rows; those of many copy it to
two places on the GPU that take turns. Layers on the host are spread evenly, so that copies run beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spyglass.checkpoint.match import Source
from spyglass.errors import CapacityError
from spyglass.params.table import ParamTable

PLACES = 2  # layers on the GPU into which those on the host are copied
ExpertsMode = Literal["gpu", "host", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Layers whose experts are in host memory, of so many; bytes there, on the GPU (all weights), and of the places."""

    host: tuple[int, ...]
    layers: int
    host_bytes: int
    device_bytes: int
    place_bytes: int

    def __str__(self) -> str:
        if not self.host:
            return f"experts of all {self.layers} layers on the GPU, {self.device_bytes / 1e9:.1f} GB with the others"
        return (
            f"experts of {self.layers - len(self.host)} layers on the GPU ({self.device_bytes / 1e9:.1f} GB with all "
            f"other weights) and of {len(self.host)} in host memory ({self.host_bytes / 1e9:.1f} GB; copied, when many "
            f"rows come, into {self.place_bytes / 1e9:.1f} GB of the GPU)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Bytes per second that a GPU and the host read."""

    device: float
    host: float

    def seconds(self, device_bytes: float, host_bytes: float) -> float:
        """The least time of a decode step that reads so much of both: the one waits for the other, layer by layer."""
        return device_bytes / self.device + host_bytes / self.host


def expert_bytes(sources: Mapping[str, Source], params: ParamTable, *, expand: bool = False) -> dict[int, int]:
    """Bytes of the routed experts of each layer, as stored or widened to bfloat16."""
    found: dict[int, int] = {}
    for name, source in sources.items():
        if params[name].split == "experts":
            layer = int(name.split(".")[1])
            wide = source.weight.nbytes * 16 // source.format.bits if expand and source.scale else source.nbytes
            found[layer] = found.get(layer, 0) + wide
    return found


def place_experts(
    by_layer: Mapping[int, int],
    *,
    mode: ExpertsMode,
    most: int | None = None,
    others: int,
    beside: int,
    free: int | None,
    host_free: int | None,
) -> ExpertPlacement:
    """The placement with the most experts on the GPU, of which `most` bytes may be taken; `mode` "host": none there.

    `others` bytes of other weights are on the GPU, and `beside` of what steps and caches take at least; `free` bytes
    are free there and `host_free` on the host (None = nobody knows).

    Raises:
        CapacityError: there is no such placement; the message says how much is missing and where.
    """
    largest, layers = max(by_layer.values(), default=0), sorted(by_layer)

    def placed(kept: int) -> ExpertPlacement:
        host = spread(layers, len(layers) - kept)
        on_host = sum(by_layer[layer] for layer in host)
        return ExpertPlacement(
            host=host,
            layers=len(layers),
            host_bytes=on_host,
            device_bytes=others + sum(by_layer.values()) - on_host,
            place_bytes=min(PLACES, len(host)) * largest,
        )

    def fits(one: ExpertPlacement) -> bool:
        limited = most is not None and one.device_bytes - others > most
        return not limited and (free is None or one.device_bytes + one.place_bytes + beside <= free)

    if mode == "gpu":
        return placed(len(layers))
    found = next((one for one in map(placed, range(len(layers), 0, -1)) if fits(one)), None) if mode == "auto" else None
    found = found or placed(0)
    if free is not None and (missing := found.device_bytes + found.place_bytes + beside - free) > 0:
        raise CapacityError(
            f"with all routed experts in host memory the GPU would still hold {found.device_bytes / 1e9:.2f} GB of "
            f"weights, {found.place_bytes / 1e9:.2f} GB for copies and at least {beside / 1e9:.2f} GB of steps and "
            f"caches; {free / 1e9:.2f} GB are free there, {missing / 1e9:.2f} GB are missing: lower max_step_tokens, "
            "max_sequences or max_length, or take images=0"
        )
    if host_free is not None and found.host_bytes > host_free:
        raise CapacityError(
            f"{len(found.host)} of {len(layers)} layers' experts, {found.host_bytes / 1e9:.2f} GB, would be in host "
            f"memory and {host_free / 1e9:.2f} GB are free there, {(found.host_bytes - host_free) / 1e9:.2f} GB are "
            "missing"
        )
    return found


def spread(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of them, as evenly as can be."""
    return tuple(layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count))
