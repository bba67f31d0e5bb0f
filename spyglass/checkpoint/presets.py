"""config.json of the random checkpoints: from a few megabytes up to the exact official shape (spec v4 1.1)."""

from __future__ import annotations

from typing import Any, Literal

from spyglass.checkpoint.presets_v41 import PRESETS_V41, PresetV41, preset_config_v41

PresetV4 = Literal["tiny", "mini", "flash-4layer", "flash-8layer", "flash-vision"]
Preset = PresetV4 | PresetV41
PRESETS: tuple[Preset, ...] = ("tiny", "mini", "flash-4layer", "flash-8layer", "flash-vision", *PRESETS_V41)

FLASH_VISION: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0, 0, 0],
    "compress_rope_theta": 160000,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 3,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-20,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
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
_NO_DRAFT = (
    "dspark_block_size",
    "dspark_markov_rank",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
)
_SMALLER: dict[PresetV4, dict[str, Any]] = {
    "tiny": {
        "compress_ratios": [0, 4, 128, 4, 0],
        "hidden_size": 128,
        "index_n_heads": 16,
        "max_position_embeddings": 16384,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "num_hidden_layers": 5,
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": 128,
        "vision_n_layers": 2,
        "vision_dim": 128,
        "vision_n_heads": 2,
        "vision_inter_dim": 256,
    },
    "mini": {
        "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 0],
        "hidden_size": 1024,
        "max_position_embeddings": 16384,
        "moe_intermediate_size": 512,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_hash_layers": 1,
        "num_hidden_layers": 8,
        "o_groups": 4,
        "o_lora_rank": 256,
        "q_lora_rank": 512,
        "rms_norm_eps": 1e-06,
        "vision_n_layers": 4,
        "vision_dim": 256,
        "vision_n_heads": 4,
        "vision_inter_dim": 704,
    },
    "flash-4layer": {
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 1,
        "num_hidden_layers": 4,
    },
    "flash-8layer": {
        "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 4],
        "num_hash_layers": 1,
        "num_hidden_layers": 8,
    },
}


def preset_config(preset: Preset, *, packed: bool) -> dict[str, Any]:
    """The config.json of a preset; without `packed` it describes bfloat16 weights.

    `tiny` has every mechanism at the smallest widths, `mini` is the size other engines were timed at with a small
    tower, `flash-4layer` has the official widths and all 256 experts in four layers (17 GB packed), `flash-8layer` in
    eight (31 GB), `flash-vision` is the official shape and alone has draft stages. V4.1's are in `presets_v41`.
    """
    if preset == "tiny-v41" or preset == "mini-v41" or preset == "v41-flash":
        return preset_config_v41(preset, packed=packed)
    config = dict(FLASH_VISION)
    if preset != "flash-vision":
        config |= _SMALLER[preset] | {"num_nextn_predict_layers": 0}
        config = {key: value for key, value in config.items() if key not in _NO_DRAFT}
    if not packed:
        config = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}
    return config
