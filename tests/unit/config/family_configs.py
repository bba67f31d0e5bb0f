"""The `config.json` of the four V4 family members, written out from the tables of spec v4 1.1 and 1.3, and the short
file of the reference code (1.4) with the same values."""

from __future__ import annotations

from typing import Any

VISION_KEYS: dict[str, Any] = {
    "vision_n_layers": 32,
    "vision_dim": 1024,
    "vision_n_heads": 16,
    "vision_inter_dim": 2816,
    "vision_patch_size": 14,
    "vision_rope_theta": 10000.0,
    "vision_downsample_ratio": 3,
    "vision_max_n_token": 384,
    "vision_min_pixels": 147456,
    "vision_max_wh_ratio": 8,
}
DSPARK_KEYS: dict[str, Any] = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


def flash_vision() -> dict[str, Any]:
    """V4-Flash-Vision-Exp, every key of the table in 1.1."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0],
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1048576,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 2048,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_hash_layers": 3,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-20,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "num_nextn_predict_layers": 3,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        **DSPARK_KEYS,
        **VISION_KEYS,
    }


def flash_0731() -> dict[str, Any]:
    """V4-Flash of 07-31: the vision member without pictures, with the usual eps."""
    values = {key: value for key, value in flash_vision().items() if not key.startswith("vision_")}
    return {**values, "rms_norm_eps": 1e-6}


def flash_first() -> dict[str, Any]:
    """First V4-Flash release: one classic draft block, 44 ratios, no `expert_dtype`."""
    values = {key: value for key, value in flash_0731().items() if not key.startswith("dspark_")}
    del values["expert_dtype"]
    return {**values, "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0], "num_nextn_predict_layers": 1}


def pro() -> dict[str, Any]:
    """V4-Pro."""
    return {
        **flash_first(),
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "o_groups": 16,
        "index_topk": 1024,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    }


def base() -> dict[str, Any]:
    """A base variant: experts in FP8, block scales in fp32."""
    values = {**flash_first(), "expert_dtype": "fp8"}
    values["quantization_config"] = {**values["quantization_config"], "scale_fmt": "fp32"}
    return values


MEMBERS = {
    "flash-vision": flash_vision,
    "flash-0731": flash_0731,
    "flash-first": flash_first,
    "pro": pro,
    "flash-base": base,
}


def reference_flash_vision() -> dict[str, Any]:
    """`inference/config.json` of V4-Flash-Vision-Exp: the names of 1.4."""
    return {
        "vocab_size": 129280,
        "dim": 4096,
        "moe_inter_dim": 2048,
        "n_layers": 43,
        "n_hash_layers": 3,
        "n_heads": 64,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_activated_experts": 6,
        "score_func": "sqrtsoftplus",
        "route_scale": 1.5,
        "swiglu_limit": 10.0,
        "q_lora_rank": 1024,
        "head_dim": 512,
        "rope_head_dim": 64,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "window_size": 128,
        "original_seq_len": 65536,
        "rope_theta": 10000,
        "rope_factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "compress_rope_theta": 160000,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0],
        "n_mtp_layers": 3,
        "norm_eps": 1e-20,
        **DSPARK_KEYS,
        **VISION_KEYS,
    }
