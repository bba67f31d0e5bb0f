"""The parameters of one model: what `declared` promises, with the sizes of its configuration put in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from spyglass.config.model import CompressorPlan, LayerPlan, ModelConfig, TextConfig, VisionConfig
from spyglass.families import FAMILIES
from spyglass.params.declared import (
    EXPERT,
    LAYER,
    MODEL,
    STAGE,
    TOWER,
    TOWER_BLOCK,
    AdapterGroup,
    Declared,
    Kind,
    Split,
    Stored,
)
from spyglass.quant.formats import BF16, F32, FP4, I64, Format, fp8

Component = Literal["text", "engram", "draft", "vision", "aligner", "image"]
COMPONENTS: tuple[Component, ...] = ("text", "engram", "draft", "vision", "aligner", "image")
DraftKind = Literal["dspark", "classic"]
TABLE_ROWS = fp8((1, 32))  # an engram table has one scale per row and 32 columns
MIN_UNIT = 32  # columns of the shared expert that stay together where no scale block asks for more


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter. `shape` is logical, `format` that of the official checkpoint; optional ones may be absent there.

    `split` and `unit` (rows or columns that stay together) say how tensor parallelism cuts it, see `params.shard`.
    `groups` above 1: a block-diagonal map of that many. `adapter`: its group of LoRA targets, None = takes no adapter.
    `num_experts`: how many experts the layer has, for an expert's matrix and for the table of experts; 0 elsewhere.
    """

    shape: tuple[int, ...]
    kind: Kind
    component: Component
    format: Format
    split: Split = "none"
    unit: int = 1
    groups: int = 1
    adapter: AdapterGroup | None = None
    optional: bool = False
    num_experts: int = 0

    @property
    def num_units(self) -> int:
        """Into how many parts tensor parallelism can divide it: 1 = every process has it whole."""
        if self.split == "experts":
            return self.num_experts
        return 1 if self.split == "none" else self.shape[0 if self.split == "rows" else 1] // self.unit

    @property
    def map_shape(self) -> tuple[int, int, int]:
        """(groups, inputs of one group, outputs of all groups) of a linear map, as a LoRA pair sees it."""
        return self.groups, self.shape[1], self.shape[0]


ParamTable = Mapping[str, Param]  # by native name: `layers.3.attn.wq_a`, `layers.3.attn.attn_sink`


def component_of(name: str) -> Component:
    """The component of a native name, by whole prefixes."""
    if name.startswith("mtp."):
        return "draft"
    if name.startswith("vision."):
        return "vision"
    if name.startswith("aligner."):
        return "aligner"
    if name.startswith("layers.") and ".engram.embed" in name:
        return "engram"
    return "image" if name.startswith("image_") else "text"


def stored_tensors(name: str, param: Param, format: Format) -> list[tuple[str, str, tuple[int, ...]]]:
    """(tensor name, safetensors dtype, stored shape) of a parameter written in `format`: the weight, then its scale."""
    if param.kind not in ("matrix", "table"):
        return [(name, format.weight_dtype, param.shape)]
    tensors = [(f"{name}.weight", format.weight_dtype, format.storage_shape(param.shape))]
    scale_shape = format.scale_shape(param.shape)
    if scale_shape is not None:
        assert format.scale_dtype is not None, format
        tensors.append((f"{name}.scale", format.scale_dtype, scale_shape))
    return tensors


def param_table(config: ModelConfig) -> dict[str, Param]:
    """Text, and with a tower also vision, aligner and image vectors; draft stages are in `draft_params`."""
    text, formats = config.text, _formats(config)
    sizes = _sizes(text, formats["dense"])
    has = set() if text.shifted_hyper else {"hyper_head"}
    result = dict(_instances("", MODEL, sizes, has, formats))
    for plan in text.layers:
        result |= _layer(f"layers.{plan.index}.", text, plan, formats, has_vision=config.vision is not None)
    if config.vision is not None:
        result |= tower_params(config.vision, text.hidden_size)
    return result


def most_tensors(config: ModelConfig) -> int:
    """More tensors than any checkpoint or adapter of this model lists: a weight and a scale each, drafts, and room."""
    return 4 * len(param_table(config)) * (1 + config.num_draft_layers) + 10_000


def draft_kind(names: Iterable[str]) -> DraftKind | None:
    """Which draft stages a checkpoint holds, by its tensor names (spec v4 8, 12.2 trap 4); None without any."""
    for name in names:
        if name.startswith("mtp."):
            tail = name.split(".", 2)[-1]
            if tail.startswith("main_proj."):
                return "dspark"
            if tail.startswith(("e_proj.", "h_proj.")):
                return "classic"
    return None


def draft_params(config: ModelConfig, kind: DraftKind) -> dict[str, Param]:
    """`mtp.*`: stages like window-only layers without table, plus projections and heads of their kind (spec v4 8)."""
    text, formats = config.text, _formats(config)
    sizes = _sizes(text, formats["dense"])
    if kind == "dspark":
        markov = int(config.draft["dspark_markov_rank"])
        sources = len(config.draft["dspark_target_layer_ids"])
        sizes |= {"markov": markov, "C+markov": text.hidden_size + markov, "sources": sources}
        experts = config.draft.get("dspark_n_routed_experts")
        text = text if experts is None else replace(text, n_routed_experts=int(experts))
    stage = _window_only(text.layers[0])
    last = config.num_draft_layers - 1
    result: dict[str, Param] = {}
    for index in range(config.num_draft_layers):
        has: set[str] = {"classic"} if kind == "classic" else set()
        if kind == "dspark" and index == 0:
            has |= {"dspark_first"}
        if kind == "dspark" and index == last:
            has |= {"dspark_last", *FAMILIES[config.family].markov_head}
        if kind == "classic" or index == last:
            has |= {"stage_norm"} if text.shifted_hyper else {"stage_norm", "stage_hyper_head"}
        result |= _layer(f"mtp.{index}.", text, stage, formats, has_vision=config.vision is not None)
        result |= _instances(f"mtp.{index}.", STAGE, sizes, has, formats)
    return result


def _formats(config: ModelConfig) -> dict[Stored, Format]:
    """What the official checkpoint stores each kind of tensor in."""
    formats: dict[Stored, Format] = {
        "bf16": BF16, "f32": F32, "i64": I64, "dense": BF16, "expert": BF16, "table": BF16
    }  # fmt: skip
    if config.weights is not None:
        block = config.weights.block
        expert = {"fp8": fp8(block, "F32"), "bf16": BF16}.get(config.weights.expert_dtype or "fp4", FP4)
        formats |= {"dense": fp8(block), "expert": expert, "table": TABLE_ROWS}
    return formats


def _sizes(text: TextConfig, dense: Format) -> dict[str, int]:
    """Sizes by the letters of `docs/shapes.md`, and others by a word; `dense` is the format of dense matrices."""
    streams, shared = text.hc_mult, text.moe_intermediate_size * text.n_shared_experts
    return {
        "V": text.vocab_size,
        "C": text.hidden_size,
        "H": text.num_attention_heads,
        "h": text.num_attention_heads // text.o_groups,  # heads of an output group
        "D": text.head_dim,
        "Q": text.q_lora_rank,
        "G": text.o_groups,
        "O": text.o_lora_rank,
        "N": text.index_n_heads,
        "I": text.index_head_dim,
        "E": text.n_routed_experts,
        "K": text.num_experts_per_tok,
        "F": text.moe_intermediate_size,
        "M": streams,
        "M1": streams + 1,
        "mixes": (2 + streams) * streams,
        "shared": shared,
        "shared_unit": math.gcd(shared, MIN_UNIT if dense.block is None else dense.block[0]),
    }


def _instances(
    prefix: str,
    declared: Iterable[Declared],
    sizes: Mapping[str, int],
    has: set[str],
    formats: Mapping[Stored, Format],
    num_experts: int = 0,
) -> Iterator[tuple[str, Param]]:
    """The parameters of a section that exist, by full name."""

    def size(axis: str) -> int:
        return math.prod(int(factor) if factor.isdecimal() else sizes[factor] for factor in axis.split("*"))

    for one in declared:
        if one.needs and one.needs not in has:
            continue
        name = f"{prefix}{one.name}"
        yield (
            name,
            Param(
                shape=tuple(size(axis) for axis in one.shape.split()),
                kind=one.kind,
                component=component_of(name),
                format=formats[one.stored],
                split=one.split,
                unit=size(one.unit),
                groups=size(one.groups),
                adapter=None if prefix.startswith("mtp.") else one.adapter,
                optional=one.optional,
                num_experts=sizes["E"] if one.kind == "index" else num_experts,
            ),
        )


def _window_only(like: LayerPlan) -> LayerPlan:
    """Plan of a draft stage: no compressor, no table."""
    return replace(
        like,
        ratio=0,
        compressor=None,
        kv_from=None,
        index_from=None,
        index_keys_from=None,
        candidates_from=None,
        router="topk",
        engram=False,
        makes_candidates=False,
    )


def _layer(
    prefix: str, text: TextConfig, plan: LayerPlan, formats: Mapping[Stored, Format], *, has_vision: bool
) -> dict[str, Param]:
    """One decoder layer or draft stage."""
    sizes, has = _sizes(text, formats["dense"]), {"expert_table" if plan.router == "hash" else "no_expert_table"}
    if has_vision:
        has.add("vision")
    if plan.index_from == plan.index:
        has.add("indexer")
    if plan.compressor is not None:
        has |= _compressor_has(plan.compressor)
        sizes |= {"series": 2 if plan.compressor.overlap else 1, "ratio": plan.compressor.ratio}
    if plan.engram:
        engram = text.engram
        assert engram is not None
        has.add("engram")
        entries = engram.num_rows[engram.layers.index(plan.index)]
        sizes |= {"entries": entries, "entry": engram.head_dim, "lookup": engram.row_width}
    result = dict(_instances(prefix, LAYER, sizes, has, formats))
    expert = dict(_instances(prefix, EXPERT, sizes, has, formats, text.n_routed_experts))
    return result | {
        f"{prefix}ffn.experts.{number}.{name.removeprefix(prefix)}": param
        for number in range(text.n_routed_experts)
        for name, param in expert.items()
    }


def _compressor_has(plan: CompressorPlan) -> set[str]:
    has = {"compressor"}
    if plan.gated:
        has.add("compressor_gate")
    if plan.positional_bias:
        has.add("compressor_bias")
    if plan.index_keys == "compressor":
        has |= {f"key_{name}" for name in has}
    return has | ({"latent_keys"} if plan.index_keys == "latent" else set())


def tower_params(vision: VisionConfig, hidden_size: int) -> dict[str, Param]:
    """Tower, aligner to a text model of `hidden_size`, and the vectors of the token block."""
    formats: dict[Stored, Format] = {"bf16": BF16}
    sizes = {
        "C": hidden_size,
        "Y": vision.hidden_size,
        "mlp": vision.intermediate_size,
        "patch": 3 * vision.patch_size**2,
        "cell": vision.downsample_ratio**2,
    }
    has = {"image_pad"} if vision.layout == "paired" else set()  # one in reading order has no pads
    result = dict(_instances("", TOWER, sizes, has, formats))
    for index in range(vision.num_hidden_layers):
        result |= _instances(f"vision.blocks.{index}.", TOWER_BLOCK, sizes, has, formats)
    return result
