"""Fields that no computation reads and that say something else than is computed: they are refused, not ignored.

Checkpoints are saved by many programs, each with words of its own for the same thing. A field listed here may be
absent, null, or what is computed; any other value describes another model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from spyglass.config.fields import Fields
from spyglass.config.model import TextConfig, VisionConfig

_Value = object
# The only value that is computed; null stands for none of it.
_ALWAYS: Mapping[str, _Value] = {
    **dict.fromkeys(
        ("mlp_bias", "use_bias", "bias", "qkv_bias", "o_bias", "out_bias", "lm_head_bias", "attention_out_bias"), False
    ),
    **dict.fromkeys(("tie_word_embeddings", "tie_embeddings", "attention_bias"), False),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "use_sliding_window"), True),
    **dict.fromkeys(("use_attn_sink", "attn_sink", "use_attention_sink", "attention_sink"), True),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq", "decoder_sparse_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 0),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "gate_temp"), 1),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "logit_softcapping", "logits_soft_cap", "alibi"), None
    ),
    **dict.fromkeys(("hidden_activation", "activation_function", "hidden_act"), "silu"),
    **dict.fromkeys(("index_topk_freq", "num_key_value_heads"), 1),
    "is_causal": True,
    "num_channels": 3,
    "in_channels": 3,
    "temporal_patch_size": 1,
}
_OF_V41 = (
    "kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id", "engram_layer_ids", "text_config",
    "vision_config",
)  # fmt: skip
_OWN = ("architectures", "transformers_version", "torch_dtype", "dtype", "model_type", "use_cache", "auto_map")


def refuse_contradictions(fields: Fields, text: TextConfig) -> None:
    """Compare what is left unread in the object that describes the backbone.

    Raises:
        ConfigError: a field says something else than is computed.
    """
    ratios = [plan.ratio for plan in text.layers]
    rope = text.layers[0].rope.dim
    implied: dict[str, _Value] = {
        "q_head_norm": text.q_head_norm,
        "use_q_head_norm": text.q_head_norm,
        "shifted_hyper": text.shifted_hyper,
        "num_hash_layers": sum(plan.router == "hash" for plan in text.layers),
        **dict.fromkeys(("v_head_dim", "qk_head_dim", "query_pre_attn_scalar"), text.head_dim),
        "qk_nope_head_dim": text.head_dim - rope,
        "rotary_dim": rope,
        "partial_rotary_factor": rope / text.head_dim,
        **dict.fromkeys(("num_local_experts", "num_experts", "n_experts"), text.n_routed_experts),
        **dict.fromkeys(("moe_topk", "top_k_experts", "num_selected_experts"), text.num_experts_per_tok),
        "shared_expert_intermediate_size": text.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": text.moe_intermediate_size,
    }
    if not text.shifted_hyper:
        implied |= dict.fromkeys(_OF_V41)
    _refuse(fields, {**_ALWAYS, **implied})
    words = fields.unseen().get("layer_types")
    if isinstance(words, list) and [word == "sliding_attention" for word in words] != [ratio == 0 for ratio in ratios]:
        raise fields.error("layer_types", f"'sliding_attention' where {fields.spelling('compress_ratios')} has 0")


def refuse_vision_contradictions(tower: Fields, vision: VisionConfig, text: TextConfig) -> None:
    """The same in an object of its own for the vision tower.

    Raises:
        ConfigError: as `refuse_contradictions`.
    """
    implied = {
        "num_key_value_heads": vision.num_attention_heads,
        "head_dim": vision.hidden_size // vision.num_attention_heads,
        **dict.fromkeys(("out_hidden_size", "projection_dim", "text_hidden_size"), text.hidden_size),
        **dict.fromkeys(("spatial_merge_size", "merge_size"), vision.downsample_ratio),
    }
    known = {key: value for key, value in _ALWAYS.items() if not key.endswith("_bias") and key != "is_causal"}
    _refuse(tower, {**known, **implied})


def refuse_repeated(outer: Fields, inner: Fields, names: Mapping[str, str] | None = None) -> None:
    """Refuse a field of `outer` that `inner`, where it is read, has with another value.

    `names`: fields of `outer` and what they are called in `inner`; None = all, under the same names.

    Raises:
        ConfigError: the two differ.
    """
    for name, value in outer.unseen().items():
        called = name if names is None else names.get(name, "")
        told = inner.values.get(called)
        if value is not None and told is not None and told != value and name not in _OWN:
            raise outer.error(name, f"the same as {inner.prefix}{called}, or nothing")


def _refuse(fields: Fields, computed: Mapping[str, _Value]) -> None:
    for name, value in fields.unseen().items():
        if value is None or name not in computed:
            continue
        expected = computed[name]
        if expected is None and value not in ([], {}, False, 0):
            raise fields.error(name, "nothing: it is not computed here")
        if expected is not None and not _same(value, expected):
            raise fields.error(name, f"{json.dumps(expected)}, which is what is computed, or nothing")


def _same(value: _Value, expected: _Value) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool) or not isinstance(value, int | float):
        return value is expected if isinstance(value, bool) else value == expected
    return isinstance(expected, int | float) and math.isclose(value, expected, rel_tol=1e-4)
