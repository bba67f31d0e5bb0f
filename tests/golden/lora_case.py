"""The text model, adapters and prompts that went through `peft` on transformers' `deepseek_v4`.

Two models: one whose experts are narrower than the hidden size, and one where both are equal, so that a transposed
product has the right shape (`square`).
"""

from __future__ import annotations

from typing import Any

from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.lora.low_rank import AdapterFile
from spyglass.quant.packed import Packed
from tests.adapter_parts import random_adapter, shapes_of
from tests.golden import oracle_case
from tests.small_models import empty_model, random_text, random_weights

SQUARE = {"oblong": False, "square": True}
LENGTHS = (9, 140)  # the second has pooled rows of both ratios
COLUMNS = slice(1, None, 4)
TEXT_GROUPS = ("attention", "compressor", "shared", "experts")
SEED = 31


def values(square: bool) -> dict[str, Any]:
    width = oracle_case.VALUES["hidden_size"] if square else oracle_case.VALUES["moe_intermediate_size"]
    return oracle_case.VALUES | {"moe_intermediate_size": width}


def config(square: bool) -> ModelConfig:
    return parse_model_config(values(square), "lora oracle")


def weights(square: bool) -> dict[str, Packed]:
    found = random_weights(empty_model(config(square)).slots(), SEED)
    head = found["head"]
    return found | {"head": Packed(head.format, head.data * oracle_case.HEAD_GAIN, None, head.shape)}


def our_adapter(square: bool) -> AdapterFile:
    """One of ours, all groups of transformers' text model; w1 and w3 have an A each."""
    return random_adapter(shapes_of(empty_model(config(square))), TEXT_GROUPS, rank=3, alpha=6.0, seed=SEED)


def prompt(length: int) -> Any:
    return random_text(length, SEED, oracle_case.VALUES["vocab_size"])
