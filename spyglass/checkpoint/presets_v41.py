"""config.json of the random V4.1 checkpoints (spec v41 1.1): nested, from a few megabytes up to the official shape."""

from __future__ import annotations

import copy
from typing import Any, Literal

PresetV41 = Literal["tiny-v41", "mini-v41", "v41-flash"]
PRESETS_V41: tuple[PresetV41, ...] = ("tiny-v41", "mini-v41", "v41-flash")

V41_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": {
        "model_type": "deepseek_v41_text",
        "attention_bias": False,
        "candidate_block_size": 8,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "compress_ratios": [*[0] * 2, *[2] * 18, *[1] * 20, *[0] * 3],
        "compress_rope_theta": 160000,
        "dspark_block_size": 5,
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_n_routed_experts_per_tok": 3,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "engram_compressed_vocab_size": 99092,
        "engram_head_dim": 256,
        "engram_layer_ids": [1, 14],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
        "engram_num_embeddings": [384006168, 384016682],
        "engram_pad_token_id": 2,
        "engram_vocab_size": 16000000,
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_topk": 512,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "max_position_embeddings": 1048576,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 40,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 3,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1280,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-20,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    },
    "vision_config": {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
        "max_image_tokens": 1024,
        "min_pixels": 295936,
        "max_wh_ratio": None,
    },
}
_SMALLER_TEXT: dict[PresetV41, dict[str, Any]] = {
    "tiny-v41": {
        "candidate_source_layer_id": 4,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1],
        "engram_head_dim": 32,
        "engram_layer_ids": [1, 3],
        "engram_n_heads": 2,
        "engram_num_embeddings": [6126, 6332],
        "engram_vocab_size": 1000,
        "hidden_size": 128,
        "index_n_heads": 16,
        "index_source_layer_ids": [2, 4, 5],
        "kv_source_layer_ids": [2, 4],
        "max_position_embeddings": 16384,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 7,
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": 128,
    },
    "mini-v41": {
        "candidate_source_layer_id": 5,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1],
        "engram_layer_ids": [1, 4],
        "engram_num_embeddings": [482648, 488250],
        "engram_vocab_size": 20000,
        "hidden_size": 1024,
        "index_source_layer_ids": [2, 5, 7],
        "kv_source_layer_ids": [2, 5],
        "max_position_embeddings": 65536,
        "moe_intermediate_size": 512,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 8,
        "o_groups": 4,
        "o_lora_rank": 256,
        "q_lora_rank": 512,
    },
}
_SMALLER_TOWER: dict[PresetV41, dict[str, Any]] = {
    "tiny-v41": {
        "num_hidden_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    },
    "mini-v41": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 704,
    },
}


def preset_config_v41(preset: PresetV41, *, packed: bool) -> dict[str, Any]:
    """The config.json of a V4.1 preset; without `packed` it describes bfloat16 weights.

    `tiny-v41` has every mechanism at the smallest widths, `mini-v41` is of the size of `mini` with engram tables of
    256 MB, `v41-flash` is the official shape. Only `v41-flash` has draft stages.
    """
    config = copy.deepcopy(V41_FLASH)
    if preset != "v41-flash":
        text = {key: value for key, value in config["text_config"].items() if not key.startswith("dspark_")}
        config["text_config"] = text | _SMALLER_TEXT[preset] | {"num_nextn_predict_layers": 0}
        config["vision_config"] |= _SMALLER_TOWER[preset]
    if not packed:
        del config["quantization_config"]
    return config
