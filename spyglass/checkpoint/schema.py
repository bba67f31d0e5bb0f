"""Every tensor that a configuration promises: the official layouts as data (spec v4 2.1-2.2, v41 2.2). Torch-free.

Keys are slot names: a matrix is one entry (`layers.3.attn.wq_a`) however it is stored, a plain tensor has its full name
(`layers.3.attn.attn_sink`). `stored_tensors` spells an entry out as the one or two tensors of a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from spyglass.config.model import CompressorPlan, LayerPlan, ModelConfig, TextConfig, VisionConfig
from spyglass.quant.formats import BF16, F32, FP4, I64, Format, fp8

Group = Literal["text", "engram", "draft", "vision", "aligner", "image"]
GROUPS: tuple[Group, ...] = ("text", "engram", "draft", "vision", "aligner", "image")
Kind = Literal["matrix", "vector", "index", "table"]
IMAGE_VECTORS = ("image_start", "image_end", "image_newline", "image_pad")
TABLE_ROWS = fp8((1, 32))  # an engram table has one scale per row and 32 columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One entry. `shape` is logical, `official` the format of the official checkpoint; optional ones may be absent.

    `siblings`: how many experts the layer has, for an expert's matrix and for the table of experts; 0 elsewhere.
    """

    shape: tuple[int, ...]
    kind: Kind
    group: Group
    official: Format
    optional: bool = False
    siblings: int = 0


def group_of(name: str) -> Group:
    """The role group of a native name, by whole prefixes."""
    if name.startswith("mtp."):
        return "draft"
    if name.startswith("vision."):
        return "vision"
    if name.startswith("aligner."):
        return "aligner"
    if name.startswith("layers.") and ".engram.embed" in name:
        return "engram"
    return "image" if name in IMAGE_VECTORS else "text"


def stored_tensors(name: str, spec: Param, format: Format) -> list[tuple[str, str, tuple[int, ...]]]:
    """(tensor name, safetensors dtype, stored shape) of an entry written in `format`: the weight, then its scale."""
    if spec.kind not in ("matrix", "table"):
        return [(name, format.weight_dtype, spec.shape)]
    tensors = [(f"{name}.weight", format.weight_dtype, format.storage_shape(spec.shape))]
    scale_shape = format.scale_shape(spec.shape)
    if scale_shape is not None:
        assert format.scale_dtype is not None, format
        tensors.append((f"{name}.scale", format.scale_dtype, scale_shape))
    return tensors


@dataclass(frozen=True, slots=True)
class _Formats:
    """What the official checkpoint stores dense and expert matrices in."""

    dense: Format
    expert: Format


def _official_formats(config: ModelConfig) -> _Formats:
    if config.weights is None:
        return _Formats(BF16, BF16)
    block = config.weights.block
    expert = {"fp8": fp8(block, "F32"), "bf16": BF16}.get(config.weights.expert_dtype or "fp4", FP4)
    return _Formats(fp8(block), expert)


def param_table(config: ModelConfig) -> dict[str, Param]:
    """Text, and with a tower also vision, aligner and image vectors; draft stages are in `draft_params`."""
    text, formats = config.text, _official_formats(config)
    result = _ends(text)
    for plan in text.layers:
        result |= _layer(f"layers.{plan.index}.", text, plan, formats, has_vision=config.vision is not None)
    if config.vision is not None:
        result |= _vision(config.vision, text.hidden_size)
    return result


def draft_kind(names: Iterable[str]) -> Literal["dspark", "classic"] | None:
    """Which draft stages a checkpoint holds, told by tensor names (spec v4 8, 12.2 trap 4); None without any."""
    for name in names:
        if name.startswith("mtp."):
            tail = name.split(".", 2)[-1]
            if tail.startswith("main_proj."):
                return "dspark"
            if tail.startswith(("e_proj.", "h_proj.")):
                return "classic"
    return None


def draft_params(config: ModelConfig, kind: Literal["dspark", "classic"]) -> dict[str, Param]:
    """`mtp.*`: stages like window-only layers without table, plus projections and heads of their kind (spec v4 8)."""
    text, formats = config.text, _official_formats(config)
    stage = _window_only(text)
    experts = config.draft.get("dspark_n_routed_experts")
    if kind == "dspark" and experts is not None:
        text = replace(text, n_routed_experts=int(experts))
    width, last = text.hidden_size, config.num_draft_layers - 1
    result: dict[str, Param] = {}
    for index in range(config.num_draft_layers):
        prefix = f"mtp.{index}."
        result |= _layer(prefix, text, stage, formats, has_vision=config.vision is not None)
        if kind == "classic":
            result |= {f"{prefix}{name}": _matrix((width, width), formats.dense) for name in ("e_proj", "h_proj")}
            result |= {f"{prefix}{name}.weight": _vector((width,)) for name in ("enorm", "hnorm")}
        if kind == "classic" or index == last:
            result[f"{prefix}norm.weight"] = _vector((width,))
            if not text.shifted_hyper:
                result |= _hyper_head(f"{prefix}hc_head_", text)
    if kind == "dspark":
        result |= _dspark_ends(config, formats.dense)
    return {name: _in_group(spec, "draft") for name, spec in result.items()}


_MARKOV = {"deepseek_v4": ("markov_w1", "markov_w2"), "deepseek_v41": ("embed", "head")}


def _dspark_ends(config: ModelConfig, dense: Format) -> dict[str, Param]:
    """What only the first and the last DSpark stage have (spec v4 2.2, v41 2.2)."""
    text, last = config.text, config.num_draft_layers - 1
    width, rank = text.hidden_size, int(config.draft["dspark_markov_rank"])
    sources = len(config.draft["dspark_target_layer_ids"])
    return {
        "mtp.0.main_proj": _matrix((width, sources * width), dense),
        "mtp.0.main_norm.weight": _vector((width,)),
        **{f"mtp.{last}.markov_head.{part}": _matrix((text.vocab_size, rank)) for part in _MARKOV[config.family]},
        f"mtp.{last}.confidence_head.proj": _matrix((1, width + rank)),
    }


def _matrix(shape: tuple[int, ...], official: Format = BF16, group: Group = "text") -> Param:
    return Param(shape=shape, kind="matrix", group=group, official=official)


def _vector(shape: tuple[int, ...], official: Format = BF16, group: Group = "text") -> Param:
    return Param(shape=shape, kind="vector", group=group, official=official)


def _in_group(spec: Param, group: Group) -> Param:
    return replace(spec, group=group)


def _ends(text: TextConfig) -> dict[str, Param]:
    """What lies before the first and behind the last layer."""
    table = _matrix((text.vocab_size, text.hidden_size))
    return {
        "embed": table,
        "head": table,
        "norm.weight": _vector((text.hidden_size,)),
        **({} if text.shifted_hyper else _hyper_head("hc_head_", text)),
    }


def _hyper_head(prefix: str, text: TextConfig) -> dict[str, Param]:
    streams = text.hc_mult
    return {
        f"{prefix}fn": _vector((streams, streams * text.hidden_size), F32),
        f"{prefix}base": _vector((streams,), F32),
        f"{prefix}scale": _vector((1,), F32),
    }


def _window_only(text: TextConfig) -> LayerPlan:
    """Plan of a draft stage: no compressor, no table."""
    plan = text.layers[0]
    return LayerPlan(
        index=0,
        ratio=0,
        rope=plan.rope,
        compressor=None,
        kv_from=None,
        index_from=None,
        index_keys_from=None,
        candidates_from=None,
        router="topk",
    )


def _layer(
    prefix: str, text: TextConfig, plan: LayerPlan, formats: _Formats, *, has_vision: bool
) -> dict[str, Param]:
    """One decoder layer or draft stage."""
    result = {f"{prefix}{name}.weight": _vector((text.hidden_size,)) for name in ("attn_norm", "ffn_norm")}
    result |= _hyper(f"{prefix}hc_attn_", text) | _hyper(f"{prefix}hc_ffn_", text)
    result |= _attention(f"{prefix}attn.", text, formats.dense)
    result |= _compression(f"{prefix}attn.", text, plan, formats.dense)
    if plan.engram:
        result |= _engram(f"{prefix}engram.", text, plan.index, formats)
    result |= _router(f"{prefix}ffn.gate", text, plan, has_vision=has_vision)
    return result | _experts(f"{prefix}ffn.", text, formats)


def _hyper(prefix: str, text: TextConfig) -> dict[str, Param]:
    """Pre, post and mixing rows of one sub-layer."""
    streams = text.hc_mult
    rows = (2 + streams) * streams
    return {
        f"{prefix}fn": _vector((rows, streams * text.hidden_size), F32),
        f"{prefix}base": _vector((rows,), F32),
        f"{prefix}scale": _vector((3,), F32),
    }


def _attention(prefix: str, text: TextConfig, dense: Format) -> dict[str, Param]:
    heads, dim, rank = text.num_attention_heads, text.head_dim, text.q_lora_rank
    group_rows = text.o_groups * text.o_lora_rank
    return {
        f"{prefix}attn_sink": _vector((heads,), F32),
        f"{prefix}wq_a": _matrix((rank, text.hidden_size), dense),
        f"{prefix}q_norm.weight": _vector((rank,)),
        f"{prefix}wq_b": _matrix((heads * dim, rank), dense),
        f"{prefix}wkv": _matrix((dim, text.hidden_size), dense),
        f"{prefix}kv_norm.weight": _vector((dim,)),
        f"{prefix}wo_a": _matrix((group_rows, heads // text.o_groups * dim), dense),
        f"{prefix}wo_b": _matrix((text.hidden_size, group_rows), dense),
    }


def _compression(prefix: str, text: TextConfig, plan: LayerPlan, dense: Format) -> dict[str, Param]:
    """Compressor and indexer of a layer that owns them."""
    result: dict[str, Param] = {}
    if plan.compressor is not None:
        result |= _pooling(f"{prefix}compressor.", text, plan.compressor, text.head_dim)
        result |= _index_keys(f"{prefix}indexer.", text, plan.compressor)
    if plan.index_from == plan.index:
        heads, dim = text.index_n_heads, text.index_head_dim
        result[f"{prefix}indexer.wq_b"] = _matrix((heads * dim, text.q_lora_rank), dense)
        result[f"{prefix}indexer.weights_proj"] = _matrix((heads, text.hidden_size))
    return result


def _index_keys(prefix: str, text: TextConfig, compressor: CompressorPlan) -> dict[str, Param]:
    """What makes the index keys of a layer that owns compressed rows: a compressor of their own, or the latent."""
    dim = text.index_head_dim
    if compressor.index_keys == "compressor":
        return _pooling(f"{prefix}compressor.", text, compressor, dim)
    if compressor.index_keys == "latent":
        return {f"{prefix}wk": _matrix((dim, text.head_dim)), f"{prefix}k_norm.weight": _vector((dim,))}
    return {}


def _pooling(prefix: str, text: TextConfig, compressor: CompressorPlan, dim: int) -> dict[str, Param]:
    """One compressor that makes rows of `dim` channels; overlapping ones carry a second series of columns."""
    width = dim * (2 if compressor.overlap else 1)
    result = {f"{prefix}wkv": _matrix((width, text.hidden_size)), f"{prefix}norm.weight": _vector((dim,))}
    if compressor.gated:
        result[f"{prefix}wgate"] = _matrix((width, text.hidden_size))
    if compressor.positional_bias:
        result[f"{prefix}ape"] = _vector((compressor.ratio, width), F32)
    return result


def _engram(prefix: str, text: TextConfig, layer: int, formats: _Formats) -> dict[str, Param]:
    """Table and gate of an engram layer (spec v41 2.2)."""
    engram, streams, width = text.engram, text.hc_mult, text.hidden_size
    assert engram is not None
    rows = engram.num_rows[engram.layers.index(layer)]
    stored = BF16 if formats.dense == BF16 else TABLE_ROWS
    table = Param(shape=(rows, engram.head_dim), kind="table", group="engram", official=stored)
    return {
        f"{prefix}embed": table,
        f"{prefix}wkv": _matrix(((streams + 1) * width, engram.row_width), formats.dense),
        **{f"{prefix}{name}": _vector((streams, width)) for name in ("q_weight", "k_weight")},
    }


def _router(prefix: str, text: TextConfig, plan: LayerPlan, *, has_vision: bool) -> dict[str, Param]:
    experts, hashed = text.n_routed_experts, plan.router == "hash"
    bias = Param(shape=(experts,), kind="vector", group="text", official=F32, optional=hashed)
    result = {prefix: _matrix((experts, text.hidden_size)), f"{prefix}.bias": bias}
    if has_vision:
        result[f"{prefix}.bias_vl"] = _vector((experts,), F32)
    if hashed:
        shape = (text.vocab_size, text.num_experts_per_tok)
        result[f"{prefix}.tid2eid"] = Param(
            shape=shape, kind="index", group="text", official=I64, siblings=experts
        )
    return result


def _experts(prefix: str, text: TextConfig, formats: _Formats) -> dict[str, Param]:
    width, inner = text.hidden_size, text.moe_intermediate_size
    up, down = (
        replace(_matrix(shape, formats.expert), siblings=text.n_routed_experts)
        for shape in ((inner, width), (width, inner))
    )
    result = {
        f"{prefix}experts.{expert}.{name}": spec
        for expert in range(text.n_routed_experts)
        for name, spec in (("w1", up), ("w2", down), ("w3", up))
    }
    inner *= text.n_shared_experts
    up, down = _matrix((inner, width), formats.dense), _matrix((width, inner), formats.dense)
    return result | {f"{prefix}shared_experts.{name}": spec for name, spec in (("w1", up), ("w2", down), ("w3", up))}


def _vision(vision: VisionConfig, text_width: int) -> dict[str, Param]:
    """Tower, aligner and the vectors of the token block; one in reading order has no pads."""
    width, inner, patch = vision.hidden_size, vision.intermediate_size, 3 * vision.patch_size**2

    def linear(
        name: str, rows: int, columns: int, group: Group = "vision", *, bias: bool = True
    ) -> dict[str, Param]:
        result = {name: _matrix((rows, columns), group=group)}
        return result | ({f"{name}.bias": _vector((rows,), group=group)} if bias else {})

    result = linear("vision.patch_embed.proj", width, patch)
    for index in range(vision.num_hidden_layers):
        prefix = f"vision.blocks.{index}."
        result |= {f"{prefix}{name}.weight": _vector((width,), group="vision") for name in ("norm1", "norm2")}
        result |= linear(f"{prefix}attn.wqkv", 3 * width, width) | linear(f"{prefix}attn.wo", width, width)
        result |= linear(f"{prefix}mlp.w1", 2 * inner, width, bias=False)
        result |= linear(f"{prefix}mlp.w2", width, inner, bias=False)
    result["vision.norm.weight"] = _vector((width,), group="vision")
    result |= linear("aligner.w1", text_width, vision.downsample_ratio**2 * width, "aligner")
    result |= linear("aligner.w2", text_width, text_width, "aligner")
    vectors = [name for name in IMAGE_VECTORS if vision.layout == "paired" or name != "image_pad"]
    return result | {name: _vector((text_width,), group="image") for name in vectors}
