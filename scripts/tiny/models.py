"""The two tiny models: the official config.json of their family with small numbers, every mechanism left on.

Images are made at least 252 x 252 pixels (6 x 6 cells) and at most about 550 x 550, so a question with an image is
about 80 tokens. Kept from the releases: head_dim 512, rope 64, window, streams, ratios, rounding, block sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from spyglass.config.presets import preset_config
from spyglass.params.table import Param
from spyglass.tiny_world.cases import EVERYDAY, Split, kinds_of
from spyglass.tiny_world.questions import KINDS
from spyglass.tiny_world.uses import use_kinds_of

Family = Literal["v4", "v41"]
FAMILIES: tuple[Family, ...] = ("v4", "v41")
NAMES = {family: f"spyglass-tiny-{family}" for family in FAMILIES}
LEAST_PIXELS = 252 * 252
MAX_IMAGE_TOKENS = 200
# What is drawn for training, repeated kinds more often. V4.1 reads images in one direction only: comparing, counts and
# boxes take it more questions, and without its share of colours and shapes it knows only the pairs it was taught.
# A case with tools has as many tokens as eight others.
_USES = (
    *("text-first", "first-questions", "unknown") * 8,
    *("json",) * 7,
    *("earlier",) * 6,
    *("between", "system") * 5,
    *("tools",) * 3,
)
MIXTURES: dict[Family, tuple[str, ...]] = {
    "v4": (*EVERYDAY, "count", "count", *_USES),
    "v41": (*KINDS, *KINDS, *KINDS, *("count",) * 3, *("grounding",) * 5, "compare", "number", "word", *_USES),
}
_TEXT = {
    "hidden_size": 192,
    "index_n_heads": 4,
    "max_position_embeddings": 16384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "o_groups": 2,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
    "rms_norm_eps": 1e-6,
}
_TOWER = {"layers": 6, "width": 160, "heads": 5, "inner": 352}


def in_split(kinds: Sequence[str], split: Split) -> tuple[str, ...]:
    """Those of the kinds that a split has."""
    known = (*kinds_of(split), *use_kinds_of(split))
    return tuple(kind for kind in kinds if kind in known)


def tiny_config(family: Family, vocab_size: int, *, image_token_id: int, classes: int) -> dict[str, Any]:
    """config.json; the last two are V4.1's: the image placeholder, the size of the compressed vocabulary."""
    return _v4(vocab_size) if family == "v4" else _v41(vocab_size, image_token_id, classes)


def _v4(vocab_size: int) -> dict[str, Any]:
    schedule = [0, 128, 0, 4, 0]
    return preset_config("tiny", packed=True) | {
        **_TEXT,
        "compress_ratios": schedule,
        "num_hidden_layers": len(schedule),
        "num_hash_layers": 1,
        "vocab_size": vocab_size,
        "vision_n_layers": _TOWER["layers"],
        "vision_dim": _TOWER["width"],
        "vision_n_heads": _TOWER["heads"],
        "vision_inter_dim": _TOWER["inner"],
        "vision_min_pixels": LEAST_PIXELS,
        "vision_max_n_token": MAX_IMAGE_TOKENS,
    }


def _v41(vocab_size: int, image_token_id: int, classes: int) -> dict[str, Any]:
    config = preset_config("tiny-v41", packed=True) | {"image_token_id": image_token_id}
    schedule = [0, 2, 2, 1, 1]
    config["text_config"] |= {
        **_TEXT,
        "candidate_source_layer_id": 3,
        "compress_ratios": schedule,
        "engram_compressed_vocab_size": classes,
        "engram_head_dim": 32,
        "engram_layer_ids": [1, 2],
        "engram_n_heads": 2,
        "index_source_layer_ids": [1, 3, 4],
        "index_topk": 2048,  # indexers are not trained: up to so many entries they leave nothing out
        "kv_source_layer_ids": [1, 3],
        "num_hidden_layers": len(schedule),
        "vocab_size": vocab_size,
    }
    config["vision_config"] |= {
        "num_hidden_layers": _TOWER["layers"],
        "hidden_size": _TOWER["width"],
        "num_attention_heads": _TOWER["heads"],
        "intermediate_size": _TOWER["inner"],
        "min_pixels": LEAST_PIXELS,
        "max_image_tokens": MAX_IMAGE_TOKENS,
    }
    return config


def initial_value(name: str, spec: Param, seed: int) -> torch.Tensor:
    """Where training starts, fp32: matrices that keep the size of what they multiply, outputs of sub-layers smaller,
    norms 1, biases 0, streams read and written almost evenly and mixed almost not."""
    digest = [seed, *name.encode()]
    source = torch.Generator().manual_seed(hash_of(digest))
    noise = torch.randn(spec.shape, generator=source)
    tail = name.removesuffix(".weight").rpartition(".")[2]
    if spec.kind == "index":
        return torch.rand((spec.shape[0], spec.num_experts), generator=source).argsort(dim=1)[:, : spec.shape[1]]
    if tail in ("embed", "image_start", "image_end", "image_newline", "image_pad"):
        return 0.5 * noise
    if "hc_" in tail:
        return _hyper(tail, noise)
    if tail.endswith("norm") or tail in ("norm1", "norm2", "q_weight", "k_weight"):
        return torch.ones(spec.shape)
    if len(spec.shape) == 1 or tail == "ape":
        return torch.zeros(spec.shape)
    smaller = 0.4 if tail in ("wo_b", "w2", "wo", "head") else 1.0
    return smaller * noise / math.sqrt(spec.shape[-1])


def _hyper(tail: str, noise: torch.Tensor) -> torch.Tensor:
    """Mixing weights whose input-dependent part starts small; a little noise makes the streams differ."""
    if tail.endswith("_fn"):
        return noise / math.sqrt(noise.shape[-1])
    if tail.endswith("_scale"):
        return torch.full_like(noise, 0.1)
    streams = len(noise) if tail == "hc_head_base" else math.isqrt(len(noise) + 1) - 1
    centre = torch.zeros_like(noise)
    centre[:streams] = -math.log(max(streams - 1, 1))
    if tail != "hc_head_base":
        centre[2 * streams :] = 2.0 * torch.eye(streams).flatten()
    return centre + 0.3 * noise


def hash_of(numbers: list[int]) -> int:
    """A seed for a generator, the same on every machine."""
    value = 0xCBF29CE484222325
    for number in numbers:
        value = ((value ^ number) * 0x100000001B3) % (1 << 63)
    return value
