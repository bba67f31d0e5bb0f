"""The text model and prompts given to transformers: small, but with the release's window, ratios and top-k."""

from __future__ import annotations

from typing import Any

import numpy as np

from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.quant.packed import Packed
from tests.small_models import SMALL, empty_model, random_text, random_weights

VALUES: dict[str, Any] = {key: value for key, value in SMALL.items() if not key.startswith("vision_")} | {
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 160000,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 64,
    "hidden_size": 64,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": 512,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "o_groups": 2,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000,
    "sliding_window": 128,
    "swiglu_limit": 1.0,
    "vocab_size": 128,
}
LENGTHS = range(1, 601)
LONG = 2300
LONG_ROWS = slice(1950, LONG)  # selection starts behind row 2050
COLUMNS = slice(3, None, 8)
HEAD_GAIN = 4.0  # logits of standard deviation about 4
SEED = 20
RESEEDED = {264: 21}  # with the common seed this prompt has two experts 2.4e-7 apart: a coin toss, not a test


def config() -> ModelConfig:
    return parse_model_config(VALUES, "oracle")


def weights() -> dict[str, Packed]:
    """Seeded bf16 and fp32 weights; the head is scaled up."""
    out = random_weights(empty_model(config()).slots(), SEED)
    head = out["head"]
    return out | {"head": Packed(head.format, head.data * HEAD_GAIN, None, head.shape)}


def prompt(length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return random_text(length, RESEEDED.get(length, SEED), VALUES["vocab_size"])
