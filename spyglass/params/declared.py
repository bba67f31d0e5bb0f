"""Every parameter of the model families, one line each (spec v4 2.1-2.3, v41 2.2).

A shape is a list of axes; an axis is a product of the sizes of `params.sizes`, whose letters are those of
`docs/shapes.md`. `needs` names what a layer or a model must have for the parameter to exist.

Tensor parallelism cuts what has a `split`: output rows, input columns, or whole experts. `unit` is what stays together:
the heads of one output group, so that `wq_b`, `attn_sink`, `wo_a` and `wo_b` are cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matrix", "vector", "index", "table"]
Split = Literal["none", "rows", "columns", "experts"]
Stored = Literal["dense", "expert", "table", "bf16", "f32", "i64"]
AdapterGroup = Literal["attention", "compressor", "indexer", "shared", "experts", "engram", "tower", "aligner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One parameter of a model, a layer, an expert or a tower block; `name` and `hf_name` begin there.

    A matrix or table has no `.weight` in its name: it may be stored as one tensor or, packed, as two. `stored` is the
    kind of format in the official checkpoint. `groups` above 1: a block-diagonal map. `adapter`: its group of LoRA
    targets.
    """

    name: str
    hf_name: str
    shape: str
    kind: Kind
    stored: Stored
    needs: str = ""
    split: Split = "none"
    unit: str = "1"
    groups: str = "1"
    adapter: AdapterGroup | None = None
    optional: bool = False


def _matrix(
    name: str,
    hf_name: str,
    shape: str,
    stored: Stored = "bf16",
    *,
    needs: str = "",
    split: Split = "none",
    unit: str = "1",
    groups: str = "1",
    adapter: AdapterGroup | None = None,
) -> Declared:
    return Declared(
        name=name,
        hf_name=hf_name,
        shape=shape,
        kind="matrix",
        stored=stored,
        needs=needs,
        split=split,
        unit=unit,
        groups=groups,
        adapter=adapter,
    )


def _vector(name: str, hf_name: str, shape: str, stored: Stored = "bf16", needs: str = "") -> Declared:
    return Declared(name=name, hf_name=hf_name, shape=shape, kind="vector", stored=stored, needs=needs)


def _norm(name: str, hf_name: str, size: str, needs: str = "") -> Declared:
    return _vector(f"{name}.weight", f"{hf_name}.weight", size, needs=needs)


def _hyper(name: str, hf_name: str, rows: str, scales: str, needs: str = "") -> tuple[Declared, ...]:
    """The mixing weights of one hyper-connection."""
    return (
        _vector(f"{name}_fn", f"{hf_name}fn", f"{rows} M*C", "f32", needs),
        _vector(f"{name}_base", f"{hf_name}base", rows, "f32", needs),
        _vector(f"{name}_scale", f"{hf_name}scale", scales, "f32", needs),
    )


def _compressor(
    name: str, hf_name: str, dim: str, needs: tuple[str, str, str], adapter: AdapterGroup
) -> tuple[Declared, ...]:
    """One compressor that makes rows of `dim` channels; `needs`: what it, its gate and its bias need."""
    exists, gate, bias = needs
    width = f"series*{dim}"
    return (
        _matrix(f"{name}.wkv", f"{hf_name}.kv_proj", f"{width} C", needs=exists, adapter=adapter),
        _norm(f"{name}.norm", f"{hf_name}.kv_norm", dim, exists),
        _matrix(f"{name}.wgate", f"{hf_name}.gate_proj", f"{width} C", needs=gate, adapter=adapter),
        _vector(f"{name}.ape", f"{hf_name}.position_bias", f"ratio {width}", "f32", bias),
    )


MODEL = (
    _matrix("embed", "model.embed_tokens", "V C", split="rows"),
    _matrix("head", "lm_head", "V C", split="rows"),
    _norm("norm", "model.norm", "C"),
    *_hyper("hc_head", "model.hc_head.hc_", "M", "1", "hyper_head"),
)
LAYER = (
    _norm("attn_norm", "input_layernorm", "C"),
    _norm("ffn_norm", "post_attention_layernorm", "C"),
    *_hyper("hc_attn", "attn_hc.", "mixes", "3"),
    *_hyper("hc_ffn", "ffn_hc.", "mixes", "3"),
    Declared(
        name="attn.attn_sink", hf_name="self_attn.sinks", shape="H", kind="vector", stored="f32", split="rows", unit="h"
    ),
    _matrix("attn.wq_a", "self_attn.q_a_proj", "Q C", "dense", adapter="attention"),
    _norm("attn.q_norm", "self_attn.q_a_norm", "Q"),
    _matrix("attn.wq_b", "self_attn.q_b_proj", "H*D Q", "dense", split="rows", unit="h*D", adapter="attention"),
    _matrix("attn.wkv", "self_attn.kv_proj", "D C", "dense", adapter="attention"),
    _norm("attn.kv_norm", "self_attn.kv_norm", "D"),
    _matrix(
        "attn.wo_a", "self_attn.o_a_proj", "G*O h*D", "dense", split="rows", unit="O", groups="G", adapter="attention"
    ),
    _matrix("attn.wo_b", "self_attn.o_b_proj", "C G*O", "dense", split="columns", unit="O", adapter="attention"),
    *_compressor(
        "attn.compressor",
        "self_attn.compressor",
        "D",
        ("compressor", "compressor_gate", "compressor_bias"),
        "compressor",
    ),
    *_compressor(
        "attn.indexer.compressor",
        "self_attn.compressor.indexer",
        "I",
        ("key_compressor", "key_compressor_gate", "key_compressor_bias"),
        "indexer",
    ),
    _matrix("attn.indexer.wk", "attn.indexer.wk", "I D", needs="latent_keys", adapter="indexer"),
    _norm("attn.indexer.k_norm", "attn.indexer.k_norm", "I", "latent_keys"),
    _matrix(
        "attn.indexer.wq_b",
        "self_attn.compressor.indexer.q_b_proj",
        "N*I Q",
        "dense",
        needs="indexer",
        split="rows",
        unit="I",
        adapter="indexer",
    ),
    _matrix(
        "attn.indexer.weights_proj",
        "self_attn.compressor.indexer.scorer.weights_proj",
        "N C",
        needs="indexer",
        split="rows",
        adapter="indexer",
    ),
    Declared(
        name="engram.embed",
        hf_name="engram.embed",
        shape="entries entry",
        kind="table",
        stored="table",
        needs="engram",
        split="rows",
    ),
    _matrix("engram.wkv", "engram.wkv", "M1*C lookup", "dense", needs="engram", adapter="engram"),
    _vector("engram.q_weight", "engram.q_weight", "M C", needs="engram"),
    _vector("engram.k_weight", "engram.k_weight", "M C", needs="engram"),
    _matrix("ffn.gate", "mlp.gate", "E C"),
    _vector("ffn.gate.bias", "mlp.gate.e_score_correction_bias", "E", "f32", "no_expert_table"),
    Declared(
        name="ffn.gate.bias",
        hf_name="mlp.gate.e_score_correction_bias",
        shape="E",
        kind="vector",
        stored="f32",
        needs="expert_table",
        optional=True,
    ),
    _vector("ffn.gate.bias_vl", "mlp.gate.e_score_correction_bias_vl", "E", "f32", "vision"),
    Declared(
        name="ffn.gate.tid2eid",
        hf_name="mlp.gate.tid2eid",
        shape="V K",
        kind="index",
        stored="i64",
        needs="expert_table",
    ),
    _matrix(
        "ffn.shared_experts.w1",
        "mlp.shared_experts.gate_proj",
        "shared C",
        "dense",
        split="rows",
        unit="shared_unit",
        adapter="shared",
    ),
    _matrix(
        "ffn.shared_experts.w2",
        "mlp.shared_experts.down_proj",
        "C shared",
        "dense",
        split="columns",
        unit="shared_unit",
        adapter="shared",
    ),
    _matrix(
        "ffn.shared_experts.w3",
        "mlp.shared_experts.up_proj",
        "shared C",
        "dense",
        split="rows",
        unit="shared_unit",
        adapter="shared",
    ),
)
EXPERT = (  # below `ffn.experts.{number}.` of a layer
    _matrix("w1", "gate_proj", "F C", "expert", split="experts", adapter="experts"),
    _matrix("w2", "down_proj", "C F", "expert", split="experts", adapter="experts"),
    _matrix("w3", "up_proj", "F C", "expert", split="experts", adapter="experts"),
)
STAGE = (  # a draft stage is a layer that only sees its window, and these
    _matrix("e_proj", "e_proj", "C C", "dense", needs="classic"),
    _matrix("h_proj", "h_proj", "C C", "dense", needs="classic"),
    _norm("enorm", "enorm", "C", "classic"),
    _norm("hnorm", "hnorm", "C", "classic"),
    _norm("norm", "norm", "C", "stage_norm"),
    *_hyper("hc_head", "hc_head_", "M", "1", "stage_hyper_head"),
    _matrix("main_proj", "main_proj", "C sources*C", "dense", needs="dspark_first"),
    _norm("main_norm", "main_norm", "C", "dspark_first"),
    *(
        _matrix(f"markov_head.{name}", f"markov_head.{name}", "V markov", needs=name)
        for name in ("markov_w1", "markov_w2", "embed", "head")
    ),
    _matrix("confidence_head.proj", "confidence_head.proj", "1 C+markov", needs="dspark_last"),
)


def _biased(name: str, shape: str, adapter: AdapterGroup) -> tuple[Declared, ...]:
    rows, _ = shape.split()
    return _matrix(name, name, shape, adapter=adapter), _vector(f"{name}.bias", f"{name}.bias", rows)


TOWER = (  # Transformers has the names of tower and aligner below `model.`
    *_biased("vision.patch_embed.proj", "Y patch", "tower"),
    _norm("vision.norm", "vision.norm", "Y"),
    *_biased("aligner.w1", "C cell*Y", "aligner"),
    *_biased("aligner.w2", "C C", "aligner"),
    *(_vector(f"image_{name}", f"model.image_{name}", "C") for name in ("start", "end", "newline")),
    _vector("image_pad", "model.image_pad", "C", needs="image_pad"),
)
TOWER_BLOCK = (  # below `vision.blocks.{index}.`
    _norm("norm1", "norm1", "Y"),
    _norm("norm2", "norm2", "Y"),
    *_biased("attn.wqkv", "3*Y Y", "tower"),
    *_biased("attn.wo", "Y Y", "tower"),
    _matrix("mlp.w1", "mlp.w1", "2*mlp Y", adapter="tower"),
    _matrix("mlp.w2", "mlp.w2", "Y mlp", adapter="tower"),
)
