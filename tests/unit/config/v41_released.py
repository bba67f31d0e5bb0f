"""The released V4.1-Flash configuration, both dialects, typed from spec v41 1.1 and 1.2."""

from __future__ import annotations

from typing import Any

ROPE_SCALING = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
RATIOS = [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
KV_SOURCES, INDEX_SOURCES = [2, 8, 14, 20], [2, 8, 14, 20, 24, 28, 32, 36]
TABLE_ROWS = [384006168, 384016682]

SHARED: dict[str, Any] = {
    "vocab_size": 129280,
    "head_dim": 512,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "swiglu_limit": 10.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": RATIOS,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": TABLE_ROWS,
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
}


def official() -> dict[str, Any]:
    """`config.json` of the release."""
    text = {
        **SHARED,
        "model_type": "deepseek_v41_text",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "qk_rope_head_dim": 64,
        "moe_intermediate_size": 2304,
        "num_experts_per_tok": 6,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "max_position_embeddings": 1048576,
        "rope_scaling": dict(ROPE_SCALING),
        "sliding_window": 128,
        "kv_source_layer_ids": KV_SOURCES,
        "index_source_layer_ids": INDEX_SOURCES,
        "candidate_source_layer_id": 20,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 3,
        "dspark_n_routed_experts_per_tok": 3,
    }
    vision = {
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
    }
    return {
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
        "text_config": text,
        "vision_config": vision,
    }


def reference() -> dict[str, Any]:
    """`inference/config.json` of the release."""
    return {
        **SHARED,
        "dim": 5120,
        "n_layers": 40,
        "n_heads": 64,
        "rope_head_dim": 64,
        "norm_eps": 1e-20,
        "window_size": 128,
        "moe_inter_dim": 2304,
        "n_activated_experts": 6,
        "score_func": "sqrtsoftplus",
        "route_scale": 1.5,
        "kv_source_layers": KV_SOURCES,
        "index_source_layers": INDEX_SOURCES,
        "candidate_source_layer": 20,
        "original_seq_len": 65536,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "engram_pad_id": 2,
        "n_mtp_layers": 3,
        "dspark_n_activated_experts": 3,
        "dtype": "fp8",
        "expert_dtype": "fp4",
        "vision_n_layers": 32,
        "vision_dim": 1024,
        "vision_n_heads": 16,
        "vision_inter_dim": 2816,
        "vision_patch_size": 14,
        "vision_rope_theta": 10000,
        "vision_downsample_ratio": 3,
        "vision_max_n_token": 1024,
        "vision_min_pixels": 295936,
        "vision_max_wh_ratio": None,
        "image_token_id": 129264,
    }
