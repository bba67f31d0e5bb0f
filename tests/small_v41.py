"""Small random V4.1 models built in memory, with their engram; no size or constant is that of the release."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.drafts import Drafter
from spyglass.engine.engine import Engine
from spyglass.engram import EngramStore, TableRows, hash_constants
from spyglass.engram.feed import EngramFeed
from spyglass.quant.formats import F32
from tests.engine_parts import NO_CACHES, PREFIX_BLOCK, patches
from tests.small_models import build_model, empty_model, random_text, random_weights

PAGE_ROWS = {"window": 5, "pool2": 3, "state2": 1, "pool1": 7}
SMALL_V41: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "image_token_id": 69,
    "text_config": {
        "candidate_block_size": 3,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 4,
        "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1],
        "compress_rope_theta": 40000,
        "engram_compressed_vocab_size": 50,
        "engram_head_dim": 12,
        "engram_layer_ids": [1, 4],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_num_embeddings": [252, 410],
        "engram_pad_token_id": 2,
        "engram_vocab_size": 30,
        "hc_eps": 1e-4,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 5,
        "head_dim": 40,
        "hidden_size": 48,
        "index_head_dim": 16,
        "index_n_heads": 6,
        "index_source_layer_ids": [2, 5, 7],
        "index_topk": 5,
        "kv_source_layer_ids": [2, 5],
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 40,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_attention_heads": 6,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 9,
        "num_nextn_predict_layers": 0,
        "o_groups": 3,
        "o_lora_rank": 20,
        "q_lora_rank": 36,
        "qk_rope_head_dim": 8,
        "rms_norm_eps": 1e-3,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 512,
            "beta_fast": 16,
            "beta_slow": 1,
        },
        "rope_theta": 5000,
        "routed_scaling_factor": 1.7,
        "sliding_window": 9,
        "swiglu_limit": 1.5,
        "vocab_size": 70,
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


def make_engine(
    model: Any,
    *,
    cache_bytes: int | None = None,
    step: int = 64,
    store: EngramStore | None = None,
    lookahead: int = 0,
    drafter: Drafter | None = None,
    **options: Any,
) -> Engine:
    """An engine whose pages are tiny and poisoned; `step` is `max_step_tokens`."""
    config = model.config
    chosen = EngineConfig(
        **{"max_step_tokens": step, "step_milliseconds": 0, "max_sequences": 6, **NO_CACHES, **options}
    )
    dtype = model.options.build.dtype
    blocks = CacheAllocator(
        cache_plans(config.text, lookahead),
        dtype=dtype,
        device=torch.device("cpu"),
        max_sequences=chosen.max_sequences,
        step_tokens=step,
        max_length=config.text.max_position_embeddings,
        cache_bytes=cache_bytes,
        page_rows=PAGE_ROWS,
        fill=float("nan"),
    )
    prefixes = PrefixCache(blocks, chosen.prefix_cache_bytes or 0, PREFIX_BLOCK)
    feed = EngramFeed(small_store(config) if store is None else store, device=torch.device("cpu"), dtype=dtype)
    return Engine(
        model,
        config,
        chosen,
        dtype=dtype,
        device=torch.device("cpu"),
        banned=[0, 69],
        allocator=blocks,
        prefixes=prefixes,
        lookahead=lookahead,
        drafter=drafter,
        engram=feed,
    )


def mixed_parts(parts: Sequence[int | tuple[int, int]], seed: int = 0, vocab_size: int = 68) -> list[Any]:
    """Runs of random text (a number of tokens) and random pictures (patch rows, columns), in order."""
    return [
        random_text(part, seed + number, vocab_size).tolist()
        if isinstance(part, int)
        else patches(*part, seed=seed + number)
        for number, part in enumerate(parts)
    ]
