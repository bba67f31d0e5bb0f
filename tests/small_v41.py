"""Small random V4.1 models built in memory, with their engram; no size or constant is that of the release."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.engine.engine import Engine
from spyglass.engram import EngramStore, TableRows, hash_constants
from spyglass.engram.feed import EngramFeed
from spyglass.quant.formats import F32
from tests import engine_parts
from tests.small_models import SMALL, build_model, empty_model, random_weights

PAGE_ROWS = {"window": 5, "pool2": 3, "state2": 1, "pool1": 7}
_OF_BOTH = (
    "compress_rope_theta", "hc_eps", "hc_mult", "hc_sinkhorn_iters", "head_dim", "hidden_size", "index_head_dim",
    "index_n_heads", "index_topk", "max_position_embeddings", "moe_intermediate_size", "n_routed_experts",
    "n_shared_experts", "num_attention_heads", "num_experts_per_tok", "num_nextn_predict_layers", "o_groups",
    "o_lora_rank", "q_lora_rank", "qk_rope_head_dim", "rms_norm_eps", "rope_scaling", "rope_theta",
    "routed_scaling_factor", "sliding_window", "swiglu_limit", "vocab_size",
)  # fmt: skip
SMALL_V41: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "image_token_id": 69,
    "text_config": {
        **{name: SMALL[name] for name in _OF_BOTH},
        "candidate_block_size": 3,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 4,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1],
        "engram_compressed_vocab_size": 50,
        "engram_head_dim": 12,
        "engram_layer_ids": [1, 4],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_num_embeddings": [252, 410],
        "engram_pad_token_id": 2,
        "engram_vocab_size": 30,
        "index_source_layer_ids": [2, 5, 7],
        "kv_source_layer_ids": [2, 5],
        "num_hidden_layers": 9,
    },
    "vision_config": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "patch_size": 4,
        "rope_theta": 100.0,
        "downsample_ratio": 2,
        "max_image_tokens": 40,
        "min_pixels": 64,
    },
}


def small_v41_config(**changes: Any) -> ModelConfig:
    """`SMALL_V41` with some fields of its text part changed."""
    values = copy.deepcopy(SMALL_V41)
    values["text_config"] |= changes
    return parse_model_config(values, "small v41")


def small_store(config: ModelConfig, seed: int = 0) -> EngramStore:
    """Random tables in memory; some tokens share a class."""
    engram = config.text.engram
    assert engram is not None
    random = np.random.default_rng([seed, 41])
    tables = {
        layer: TableRows(format=F32, data=random.normal(size=(rows, engram.head_dim)).astype(np.float32), scale=None)
        for layer, rows in zip(engram.layers, engram.num_rows, strict=True)
    }
    classes = (np.arange(config.text.vocab_size) * 7 % engram.num_classes).astype(np.int32)
    return EngramStore(
        config=engram, classes_V=classes, constants=hash_constants(engram), tables=tables, placement="host"
    )


def small_v41_model(seed: int = 0, *, config: ModelConfig | None = None, packed: bool = False, **options: Any) -> Any:
    """A filled model on the CPU; `options` as `small_models.build_model`."""
    config = small_v41_config() if config is None else config
    weights = random_weights(empty_model(config).slots(), seed, packed)
    return build_model(config, weights, **options)


def make_engine(model: Any, *, store: EngramStore | None = None, **options: Any) -> Engine:
    """An engine whose pages are tiny and poisoned; `options` as `engine_parts.make_engine`."""
    config, dtype = model.config, model.options.build.dtype
    feed = EngramFeed(small_store(config) if store is None else store, device=torch.device("cpu"), dtype=dtype)
    more = {"page_rows": PAGE_ROWS, "dtype": dtype, "banned": (0, 69), "engram": feed}
    return engine_parts.make_engine(model, config, **more, **options)
