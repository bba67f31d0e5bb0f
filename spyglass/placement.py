"""Where routed experts lie when a GPU has no room for all: whole layers' in host memory, and what steps then cost.

Torch-free, from headers alone. What lies on the host is computed there for steps of few rows; those of many copy it to
two places on the GPU that take turns. Layers on the host are spread evenly, so that copies run beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spyglass.checkpoint.match import Source
from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig, TextConfig
from spyglass.errors import CapacityError
from spyglass.params.table import ParamTable
from spyglass.plan import USABLE, cache_bytes, step_bytes, weight_bytes

DRAWING = 24  # bytes a logit: itself, a copy for log-probabilities, weights, their sums in float64
PREFIX_SHARE = 8  # of free memory, what the prefix cache may take
_LONG = 1 << 17  # tokens of one sequence for which there should be room
_GRAPHS = 2 << 30  # bytes of captured steps
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReads:
    """Bytes that decode steps read: weights of every row, and routed experts on the GPU and on the host, of all.

    `stored_rows`: those of the cache are codes, and not bf16.
    """

    dense: float
    experts: float
    host: float
    stored_rows: bool = False

    def of_step(self, text: TextConfig, batch: int, context: int) -> tuple[float, float]:
        """On the GPU and on the host, with the experts that `batch` rows are expected to choose, if they choose evenly,
        and the rows that they attend behind `context` tokens."""
        chosen = 1 - (1 - text.num_experts_per_tok / text.n_routed_experts) ** batch
        rows = batch * attended_bytes(text, context, self.stored_rows)
        return self.dense + self.experts * chosen + rows, self.host * chosen


def attended_bytes(text: TextConfig, context: int, stored: bool) -> float:
    """Bytes of cached rows, bf16 or as they are `stored`, that one token reads: window, compressed, all index keys."""
    total = 0.0
    for plan in cache_plans(text, stored=stored):
        rows = context // plan.tokens_per_row
        if plan.kind == "window":
            total += plan.row_bytes(2) * min(rows, text.sliding_window)
        elif plan.kind == "pool":
            total += plan.row_bytes(2) * min(rows, text.index_topk if plan.tokens_per_row < 128 else rows)
        elif plan.kind == "index":
            total += plan.row_bytes(2) * rows
    return total


def decode_reads(sources: Mapping[str, Source], params: ParamTable, found: ExpertPlacement) -> DecodeReads:
    """Of a checkpoint in a placement, from its headers."""
    dense = sum(
        source.nbytes
        for name, source in sources.items()
        if params[name].split != "experts"
        and name.startswith(("layers.", "head", "norm", "hc_head"))
        and not (params[name].component == "engram" and ".embed" in name)
    )
    experts = sum(expert_bytes(sources, params).values())
    return DecodeReads(dense=dense, experts=experts - found.host_bytes, host=found.host_bytes)


def place_model(
    config: ModelConfig,
    sources: Mapping[str, Source],
    params: ParamTable,
    options: EngineConfig,
    *,
    free: int | None,
    host_free: int | None,
    adapters: int = 0,
    on_gpu: bool = True,
) -> ExpertPlacement:
    """`place_experts` for the matched entries of a checkpoint and the options of an engine.

    Raises:
        CapacityError: as `place_experts`.
    """
    others = adapters
    for share, nbytes in weight_bytes(sources, params).items():
        here = {"experts": False, "vision": options.images > 0, "engram": options.engram == "device"}.get(share, True)
        others += (nbytes.expanded if options.expand_weights else nbytes.stored) if here else 0
    return place_experts(
        expert_bytes(sources, params, expand=options.expand_weights),
        mode=options.experts_mode,
        most=options.experts_bytes,
        others=others,
        beside=beside_weights(config, options) if on_gpu else 0,
        free=free,
        host_free=host_free,
    )


def beside_weights(config: ModelConfig, options: EngineConfig) -> int:
    """The least bytes that a GPU should have beside the weights, so that some are left for rows.

    Rows of `max_sequences` sequences, one of them long; a step, captured graphs and caches, as far as can be told.
    """
    text, wide = config.text, 2 if options.dtype == "float32" else 1  # what is counted in bfloat16
    tokens = min(options.context_length(text.max_position_embeddings), _LONG)
    rows = cache_bytes(text, "float32" if wide == 2 else "bfloat16")
    least = options.cache_bytes or int(rows.per_token * tokens + rows.fixed * options.max_sequences)
    step = wide * step_bytes(config, options.max_step_tokens, options.max_sequences)
    drawing = options.max_sequences * text.vocab_size * DRAWING
    used = least + step + drawing + options.image_cache_bytes + _GRAPHS
    if options.prefix_cache_bytes is not None:
        return int((used + options.prefix_cache_bytes) / USABLE)
    return int(used / (USABLE - 1 / PREFIX_SHARE))


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

    `others` bytes of other weights are on the GPU, and `beside` of what steps and caches should have; `free` bytes are
    free there and `host_free` on the host (None = nobody knows). Where all are on the host and less than `beside` is
    left, it is as good as can be: what is missing then shows when steps have been tried.

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
    if free is not None and (missing := found.device_bytes + found.place_bytes - free) > 0:
        raise CapacityError(
            f"with all routed experts in host memory the GPU would still hold {found.device_bytes / 1e9:.2f} GB of "
            f"weights and {found.place_bytes / 1e9:.2f} GB for copies, and {free / 1e9:.2f} GB are free there: "
            f"{missing / 1e9:.2f} GB are missing, and some more for steps and caches"
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
