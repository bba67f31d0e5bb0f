"""Every parameter of the model families, one line each (spec v4 2.1-2.3, v41 2.2).

A shape is a list of axes; an axis is a product of the sizes of `params.table`, whose letters are those of
`docs/shapes.md`. `needs` names what a layer or a model must have for the parameter to exist.

Tensor parallelism cuts what has a `split`: output rows, input columns, or whole experts. `unit` is what stays together:
the heads of one output group, so that `wq_b`, `attn_sink`, `wo_a` and `wo_b` are cut alike. Indexers are whole in every
process: all of them must choose the same rows, and so none has to wait for a sum of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["matrix", "vector", "index", "table"]
Split = Literal["none", "rows", "columns", "experts"]
Stored = Literal["dense", "expert", "table", "bf16", "f32", "i64"]
AdapterGroup = Literal["attention", "compressor", "indexer", "shared", "experts", "engram", "tower", "aligner"]


@dataclass(frozen=True, slots=True)
class Declared:
    """One parameter of a model, a layer, an expert or a tower block; `name` and `hf_name` begin there.

    A matrix or table has no `.weight` in its name: it may be stored as one tensor or, packed, as two. `stored` is the
    kind of format in the official checkpoint. `groups` above 1: a block-diagonal map. `adapter`: its group of LoRA
    targets.
    """

    name: str
    hf_name: str  # of Transformers; the same = it has none of its own
    shape: str
    stored: Stored = "bf16"
    kind: Kind = "matrix"
    needs: str = ""
    adapter: AdapterGroup | None = None
    split: Split = "none"
    unit: str = "1"
    groups: str = "1"
    optional: bool = False


def _vector(name: str, hf_name: str, shape: str, stored: Stored = "bf16", needs: str = "") -> Declared:
    return Declared(name, hf_name, shape, stored, "vector", needs)


def _norm(name: str, hf_name: str, size: str, needs: str = "") -> Declared:
    return _vector(f"{name}.weight", f"{hf_name}.weight", size, needs=needs)


def _hyper(name: str, hf_name: str, rows: str, scales: str, needs: str = "") -> tuple[Declared, ...]:
    """The mixing weights of one hyper-connection."""
    shapes = {"fn": f"{rows} M*C", "base": rows, "scale": scales}
    return tuple(_vector(f"{name}_{part}", f"{hf_name}{part}", shape, "f32", needs) for part, shape in shapes.items())


def _compressor(name: str, hf_name: str, dim: str, prefix: str, adapter: AdapterGroup) -> tuple[Declared, ...]:
    """One compressor that makes rows of `dim` channels."""
    width, needs = f"series*{dim}", f"{prefix}compressor"
    return (
        Declared(f"{name}.wkv", f"{hf_name}.kv_proj", f"{width} C", needs=needs, adapter=adapter),
        _norm(f"{name}.norm", f"{hf_name}.kv_norm", dim, needs),
        Declared(f"{name}.wgate", f"{hf_name}.gate_proj", f"{width} C", needs=f"{needs}_gate", adapter=adapter),
        _vector(f"{name}.ape", f"{hf_name}.position_bias", f"ratio {width}", "f32", f"{needs}_bias"),
    )


def _biased(name: str, shape: str, adapter: AdapterGroup) -> tuple[Declared, ...]:
    return Declared(name, name, shape, adapter=adapter), _vector(f"{name}.bias", f"{name}.bias", shape.split()[0])


_INDEXER, _HF_INDEXER = "attn.indexer", "self_attn.compressor.indexer"
_SHARED, _HF_SHARED = "ffn.shared_experts", "mlp.shared_experts"
_BIAS = "mlp.gate.e_score_correction_bias"

# fmt: off
MODEL = (
    Declared("embed", "model.embed_tokens", "V C", split="rows"),
    Declared("head", "lm_head", "V C", split="rows"),
    _norm("norm", "model.norm", "C"),
    *_hyper("hc_head", "model.hc_head.hc_", "M", "1", "hyper_head"),
)
LAYER = (
    _norm("attn_norm", "input_layernorm", "C"),
    _norm("ffn_norm", "post_attention_layernorm", "C"),
    *_hyper("hc_attn", "attn_hc.", "mixes", "3"),
    *_hyper("hc_ffn", "ffn_hc.", "mixes", "3"),
    Declared("attn.attn_sink", "self_attn.sinks", "H", "f32", "vector", split="rows", unit="h"),
    Declared("attn.wq_a", "self_attn.q_a_proj", "Q C", "dense", adapter="attention"),
    _norm("attn.q_norm", "self_attn.q_a_norm", "Q"),
    Declared("attn.wq_b", "self_attn.q_b_proj", "H*D Q", "dense", adapter="attention", split="rows", unit="h*D"),
    Declared("attn.wkv", "self_attn.kv_proj", "D C", "dense", adapter="attention"),
    _norm("attn.kv_norm", "self_attn.kv_norm", "D"),
    Declared("attn.wo_a", "self_attn.o_a_proj", "G*O h*D", "dense", adapter="attention",
             split="rows", unit="O", groups="G"),
    Declared("attn.wo_b", "self_attn.o_b_proj", "C G*O", "dense", adapter="attention", split="columns", unit="O"),
    *_compressor("attn.compressor", "self_attn.compressor", "D", "", "compressor"),
    *_compressor(f"{_INDEXER}.compressor", _HF_INDEXER, "I", "key_", "indexer"),
    Declared(f"{_INDEXER}.wk", f"{_INDEXER}.wk", "I D", needs="latent_keys", adapter="indexer"),
    _norm(f"{_INDEXER}.k_norm", f"{_INDEXER}.k_norm", "I", "latent_keys"),
    Declared(f"{_INDEXER}.wq_b", f"{_HF_INDEXER}.q_b_proj", "N*I Q", "dense", needs="indexer", adapter="indexer"),
    Declared(f"{_INDEXER}.weights_proj", f"{_HF_INDEXER}.scorer.weights_proj", "N C", needs="indexer",
             adapter="indexer"),
    Declared("engram.embed", "engram.embed", "entries entry", "table", "table", "engram", split="rows"),
    Declared("engram.wkv", "engram.wkv", "M1*C lookup", "dense", needs="engram", adapter="engram"),
    _vector("engram.q_weight", "engram.q_weight", "M C", needs="engram"),
    _vector("engram.k_weight", "engram.k_weight", "M C", needs="engram"),
    Declared("ffn.gate", "mlp.gate", "E C"),
    _vector("ffn.gate.bias", _BIAS, "E", "f32", "no_expert_table"),
    Declared("ffn.gate.bias", _BIAS, "E", "f32", "vector", "expert_table", optional=True),
    _vector("ffn.gate.bias_vl", f"{_BIAS}_vl", "E", "f32", "vision"),
    Declared("ffn.gate.tid2eid", "mlp.gate.tid2eid", "V K", "i64", "index", "expert_table"),
    Declared(f"{_SHARED}.w1", f"{_HF_SHARED}.gate_proj", "shared C", "dense", adapter="shared",
             split="rows", unit="shared_unit"),
    Declared(f"{_SHARED}.w2", f"{_HF_SHARED}.down_proj", "C shared", "dense", adapter="shared",
             split="columns", unit="shared_unit"),
    Declared(f"{_SHARED}.w3", f"{_HF_SHARED}.up_proj", "shared C", "dense", adapter="shared",
             split="rows", unit="shared_unit"),
)
EXPERT = (  # below `ffn.experts.{number}.` of a layer
    Declared("w1", "gate_proj", "F C", "expert", adapter="experts", split="experts"),
    Declared("w2", "down_proj", "C F", "expert", adapter="experts", split="experts"),
    Declared("w3", "up_proj", "F C", "expert", adapter="experts", split="experts"),
)
STAGE = (  # a draft stage is a layer that only sees its window, and these
    Declared("e_proj", "e_proj", "C C", "dense", needs="classic"),
    Declared("h_proj", "h_proj", "C C", "dense", needs="classic"),
    _norm("enorm", "enorm", "C", "classic"),
    _norm("hnorm", "hnorm", "C", "classic"),
    _norm("norm", "norm", "C", "stage_norm"),
    *_hyper("hc_head", "hc_head_", "M", "1", "stage_hyper_head"),
    Declared("main_proj", "main_proj", "C sources*C", "dense", needs="dspark_first"),
    _norm("main_norm", "main_norm", "C", "dspark_first"),
    *(Declared(f"markov_head.{name}", f"markov_head.{name}", "V markov", needs=name)
      for name in ("markov_w1", "markov_w2", "embed", "head")),
    Declared("confidence_head.proj", "confidence_head.proj", "1 C+markov", needs="dspark_last"),
)
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
    Declared("mlp.w1", "mlp.w1", "2*mlp Y", adapter="tower"),
    Declared("mlp.w2", "mlp.w2", "Y mlp", adapter="tower"),
)
