"""What a checkpoint needs and where it fits, from headers alone: nothing is loaded, torch is not imported.

Weights are counted as stored (packed) and as they are when FP8 and FP4 are widened to bfloat16. Cache rows follow spec
v4 4.7 and v41 4.6. The working memory of a step is an estimate: the tensors that are alive together at the widest point
of a layer. Engram tables are counted apart: they stay in their files, or are held once per machine in host memory, or
are whole on the first of the devices.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spyglass.checkpoint.match import Source, match
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config.cache import cache_plans, stores_rows
from spyglass.config.model import ModelConfig, TextConfig
from spyglass.config.read import read_model_config
from spyglass.errors import CapacityError
from spyglass.machine import Device, Machine
from spyglass.params.shard import Shard, even_sizes
from spyglass.params.table import Param, ParamTable, most_tensors, param_table

RowFormat = Literal["bfloat16", "float32", "packed"]
Share = Literal["experts", "divided", "copied", "vision", "engram"]
SHARES: tuple[Share, ...] = ("experts", "divided", "copied", "vision", "engram")
Tables = Literal["none", "files", "host", "devices"]
GIB = 1 << 30
GPU_SIZES = (24, 32, 48, 80, 96, 141, 192)  # GiB a card
GPU_COUNTS = (1, 2, 4, 8)
USABLE = 0.92  # of a device's memory: driver, context and fragmentation take the rest
STEP_TOKENS = 2048
STEP_SEQUENCES = 64
CONVERSATION = 8192  # tokens of one conversation, when conversations at once are counted
TRAINED_TOKENS, TRAINED_RANK = 4096, 16  # of a micro-batch, and of adapters: the defaults of `spyglass finetune`
TRAINED_GROUPS = ("attention", "shared")  # the same
TRAINED_NUMBER = 16  # bytes of a trained number: fp32 master, gradient, two moments
# A layer's backward pass takes so many times the working memory of its step: 65.9 GB at 16,377 tokens (log.md,
# "Fine-tuning at real layer sizes")
TRAINED_STEP = 4.2
_QUERIES = 16  # that share their window rows on a CPU
MIN_CONTEXT = 4096  # tokens of cache that must fit with the weights for a model to count as fitting


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of a share of the weights: as stored, and with packed matrices widened to bfloat16."""

    stored: int
    expanded: int


@dataclass(frozen=True, slots=True)
class CacheBytes:
    """Cache of one sequence, all layers: growth per token, and what it takes at any length."""

    per_token: float
    fixed: int


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a model fits into `count` devices: bytes each would hold, and tokens of cache that fit in the rest.

    `weights` counts adapters too. `context` is 0 when it does not fit; else `conversations` of `CONVERSATION` tokens
    fit at once, or of the longest context where that is shorter. `tables` says where its engram tables are, "none" for
    models without. That a model fits says nothing about whether it runs there.
    """

    name: str
    count: int
    weights: int
    usable: int
    context: int
    tables: Tables = "none"
    conversations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The whole plan. `weights` by share: experts and divided are split between devices, the rest is on each. `rows`:
    how the cache of each kind of device holds rows, with the default numerics.

    `gpus` has the engram tables outside the GPUs, `gpus_with_tables` on them (empty for models without engram), for
    those numbers of GPUs that the model divides into. `adapter_bytes` is on each. `processor_bytes` is the least memory
    of a machine without a GPU, `training_bytes` what fine-tuning an adapter with the defaults takes of one device.
    """

    weights: Mapping[Share, Bytes]
    cache: Mapping[RowFormat, CacheBytes]
    rows: Mapping[str, RowFormat]
    step_bytes: int
    here: tuple[Fit, ...]
    gpus: tuple[Fit, ...]
    gpus_with_tables: tuple[Fit, ...] = ()
    adapter_bytes: int = 0
    processor_bytes: int = 0
    training_bytes: int = 0

    @property
    def total(self) -> Bytes:
        """All weights that would be loaded; engram tables are not."""
        shares = [share for name, share in self.weights.items() if name != "engram"]
        return Bytes(sum(share.stored for share in shares), sum(share.expanded for share in shares))


def plan_memory(
    config: ModelConfig,
    sources: Mapping[str, Source],
    machine: Machine,
    *,
    packed: bool,
    threads: int = 1,
    adapter_bytes: int = 0,
) -> MemoryPlan:
    """Plan for the matched entries of a checkpoint (`checkpoint.match.Match.sources`), with its adapters.

    `packed`: `Checkpoint.has_packed_weights`, which decides about numerics. `threads`: those of a CPU, each with memory
    of its own.
    """
    params = param_table(config)
    weights, divisible = weight_bytes(sources, params), _bytes_by_units(sources, params)
    formats: tuple[RowFormat, ...] = ("bfloat16", "float32", "packed")
    cache = {format: cache_bytes(config.text, format) for format in formats}
    numerics: Literal["reference", "plain"] = "reference" if packed else "plain"
    rows: dict[str, RowFormat] = {
        kind: "packed" if stores_rows(numerics, kind) else "bfloat16" for kind in ("cpu", "cuda")
    }
    step, text = step_bytes(config), config.text
    decoded = decoded_bytes(text, text.max_position_embeddings, threads) if rows["cpu"] == "packed" else 0

    outside: Tables = "files" if weights["engram"].stored else "none"

    def fit(device: Device, count: int, rows: RowFormat, tables: Tables = outside) -> Fit:
        held = _bytes_per_device(divisible, count, tables) + adapter_bytes
        usable = int(device.free * USABLE)
        beside = held + step + (decoded if device is machine.ram else 0)
        room = usable - beside - cache[rows].fixed
        tokens = int(room / cache[rows].per_token) if cache[rows].per_token else config.text.max_position_embeddings
        context = min(tokens, config.text.max_position_embeddings)
        if room <= 0 or context < MIN_CONTEXT:
            return Fit(device.name, count, held, usable, 0, tables)
        longest = min(CONVERSATION, config.text.max_position_embeddings)
        each = cache[rows].fixed + cache[rows].per_token * longest
        return Fit(device.name, count, held, usable, context, tables, int((usable - beside) / each))

    here = [fit(machine.ram, 1, rows["cpu"])]
    if outside == "files":
        here.append(fit(machine.ram, 1, rows["cpu"], "host"))
    if machine.gpus:
        smallest = min(machine.gpus, key=lambda gpu: gpu.free)
        count = max(size for size in even_sizes(params) if size <= len(machine.gpus))
        here.append(fit(smallest, count, rows["cuda"]))
        if outside == "files":
            here.append(fit(smallest, count, rows["cuda"], "devices"))
    sizes = [Device(f"{size} GB", size * GIB, size * GIB) for size in GPU_SIZES]
    counts = [count for count in GPU_COUNTS if count in even_sizes(params)]
    gpus = tuple(fit(device, count, rows["cuda"]) for device in sizes for count in counts)
    on_gpus: tuple[Fit, ...] = ()
    if outside == "files":
        on_gpus = tuple(fit(device, count, rows["cuda"], "devices") for device in sizes for count in counts)
    least = _bytes_per_device(divisible, 1, outside) + adapter_bytes + step + decoded
    least += cache[rows["cpu"]].fixed + int(MIN_CONTEXT * cache[rows["cpu"]].per_token)
    return MemoryPlan(
        weights=weights,
        cache=cache,
        rows=rows,
        step_bytes=step,
        here=tuple(here),
        gpus=gpus,
        gpus_with_tables=on_gpus,
        adapter_bytes=adapter_bytes,
        processor_bytes=int(least / USABLE),
        training_bytes=int((_bytes_per_device(divisible, 1, outside) + training_bytes(config, params)) / USABLE),
    )


def require_memory(
    path: str | os.PathLike[str],
    free: int,
    *,
    images: bool = True,
    expand: bool = False,
    tables: bool = False,
    adapters: int = 0,
    ranks: int = 1,
    own_memory: bool = False,
) -> None:
    """Refuse a checkpoint whose weights, with the bytes of its `adapters`, exceed `free`; headers decide.

    `images`, `expand`: whether the tower is loaded, and packed weights are widened. `tables`: whether engram tables
    go to the same memory. `ranks`: processes that divide it, all of them in this memory unless each has its
    `own_memory`.

    Raises:
        ConfigError, CheckpointError: the folder cannot be read.
        CapacityError: they do not fit.
    """
    config = read_model_config(path)
    params = param_table(config)
    weights = weight_bytes(match(open_checkpoint(os.fspath(path), most_tensors(config)), params).sources, params)
    wanted: dict[Share, bool] = {"vision": images, "engram": tables}
    loaded = {name: share.expanded if expand else share.stored for name, share in weights.items()}
    loaded |= {name: 0 for name, is_wanted in wanted.items() if not is_wanted}
    copied = loaded["copied"] + loaded["vision"]
    need = sum(loaded.values()) + copied * (ranks - 1)
    if own_memory:
        need = copied + -(-(loaded["experts"] + loaded["divided"]) // ranks) + loaded["engram"]
    if need + adapters > free:
        more = f", its adapters {adapters / 1e9:.2f} GB," if adapters else ""
        raise CapacityError(
            f"the weights of {os.fspath(path)} take {need / 1e9:.2f} GB{more} and {free / 1e9:.2f} GB are free here; "
            f"`spyglass check {os.fspath(path)} --plan` tells where they fit"
        )


def cache_bytes(text: TextConfig, rows: RowFormat) -> CacheBytes:
    """Rows of all layers (spec v4 4.7): windows and un-pooled compressor rows are fixed, pooled rows and keys grow.

    "packed": rows as the codes that the model rounds them to (`quant.formats.StoredRow`).
    """
    per_token, fixed = 0.0, 0
    for plan in cache_plans(text, stored=rows == "packed"):
        row = plan.row_bytes(4 if rows == "float32" else 2)
        if plan.retention is None:
            per_token += row / plan.tokens_per_row
        else:
            fixed += row * (plan.retention + (1 if plan.kind == "window" else 0))
    return CacheBytes(per_token, fixed)


def step_bytes(config: ModelConfig, tokens: int = STEP_TOKENS, sequences: int = STEP_SEQUENCES) -> int:
    """Estimate of a step's working memory: streams, queries and expert rows of a layer, logits of its sequences."""
    text = config.text
    streams = text.hc_mult * text.hidden_size
    heads = text.num_attention_heads * text.head_dim
    experts = text.num_experts_per_tok * (3 * text.moe_intermediate_size + text.hidden_size)
    per_token = 3 * 2 * streams + 4 * streams + 3 * 2 * heads + 4 * experts
    if text.engram is not None:
        per_token += 2 * len(text.engram.layers) * text.engram.row_width
    return tokens * per_token + 4 * sequences * text.vocab_size


def decoded_bytes(text: TextConfig, tokens: int, threads: int, number: int = 2) -> int:
    """Memory in which CPU threads keep decoded rows of a cache that holds codes (`ops/csrc/attention.cpp`): what one
    query attends behind `tokens` tokens, for each thread's own queries, and for each of those that share out their
    heads, fewer than two a thread. `number`: bytes of an activation."""
    attended = [0]
    for layer in text.layers:
        rows = tokens // layer.ratio if layer.ratio else 0
        attended.append(rows if layer.index_from is None else min(rows, text.index_topk))
    return (3 * threads - 1) * (text.sliding_window + _QUERIES + max(attended)) * text.head_dim * number


def training_bytes(config: ModelConfig, params: ParamTable) -> int:
    """Estimate of what training adapters by the defaults takes beside the weights: the adapters with gradients and
    moments, the streams of each layer, and one layer's backward pass."""
    text = config.text
    trained = sum(TRAINED_RANK * sum(param.shape) for param in params.values() if param.adapter in TRAINED_GROUPS)
    streams = 2 * text.num_hidden_layers * text.hc_mult * text.hidden_size * TRAINED_TOKENS
    return trained * TRAINED_NUMBER + streams + int(TRAINED_STEP * step_bytes(config, TRAINED_TOKENS, 0))


def weight_bytes(sources: Mapping[str, Source], params: ParamTable) -> dict[Share, Bytes]:
    """Bytes of each share of the matched entries of a checkpoint."""
    stored, expanded = dict.fromkeys(SHARES, 0), dict.fromkeys(SHARES, 0)
    for name, source in sources.items():
        share = _share_of(params[name])
        stored[share] += source.nbytes
        expanded[share] += source.weight.nbytes * 16 // source.format.bits if source.scale else source.nbytes
    return {share: Bytes(stored[share], expanded[share]) for share in SHARES}


def _share_of(param: Param) -> Share:
    if param.component == "engram":
        return "engram"
    if param.component in ("vision", "aligner", "image"):
        return "vision"
    if param.split == "experts":
        return "experts"
    return "copied" if param.split == "none" else "divided"


def _bytes_by_units(sources: Mapping[str, Source], params: ParamTable) -> Counter[tuple[bool, int]]:
    """Stored bytes by (is an engram table, number of units that devices can divide between them)."""
    counts: Counter[tuple[bool, int]] = Counter()
    for name, source in sources.items():
        param = params[name]
        counts[param.component == "engram", param.num_units] += source.nbytes
    return counts


def _bytes_per_device(divisible: Mapping[tuple[bool, int], int], count: int, tables: Tables) -> int:
    """Bytes on the device that holds the most: what the last has of the weights, and the tables."""
    last, total = Shard(count - 1, count), 0
    for (is_table, units), nbytes in divisible.items():
        if not is_table:
            first, end = last.span(units)
            total += -(-nbytes * (end - first) // units)
        elif tables in ("host", "devices"):
            total += nbytes
    return total
