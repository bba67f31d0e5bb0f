"""Small random models built in memory. No size is that of a released model, so code that ignores the config fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.layers.build import BuildContext
from spyglass.layers.hosted import HostSide
from spyglass.model import ModelOptions, Numerics, VisionLanguageModel
from spyglass.ops.declare import Ops
from spyglass.ops.table import bind_ops, describe
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, F32, FP4, I64, Format, fp8
from spyglass.quant.packed import Packed, WeightSlot
from tests.driver import Tokens, picture_tokens

HOST_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# (device, which ops): the defining ops, and what `auto` takes on this machine
PLACES = [("cpu", "reference"), ("cpu", "auto"), pytest.param(("cuda", "auto"), marks=pytest.mark.gpu)]
PACKED = (".wq_a", ".wq_b", "attn.wkv", ".wo_a", ".wo_b", "shared_experts.w1", "shared_experts.w3", "shared_experts.w2")
SMALL: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 40000,
    "hc_eps": 1e-4,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "head_dim": 40,
    "hidden_size": 48,
    "index_head_dim": 16,
    "index_n_heads": 6,
    "index_topk": 5,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 40,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_attention_heads": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 4,
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
    "vision_n_layers": 1,
    "vision_dim": 16,
    "vision_n_heads": 2,
    "vision_inter_dim": 24,
    "vision_patch_size": 4,
    "vision_rope_theta": 100.0,
    "vision_downsample_ratio": 2,
    "vision_max_n_token": 384,
    "vision_min_pixels": 64,
    "vision_max_wh_ratio": 8,
}


def small_config(**changes: Any) -> ModelConfig:
    """`SMALL` with some fields changed; `vision_n_layers=0` makes a text model."""
    return parse_model_config({**SMALL, **changes}, "small")


def ops_of(place: tuple[str, Literal["auto", "reference"]], dtype: str = "float32") -> Ops:
    """The ops of a place; skips a test whose `auto` would only repeat the defining ops."""
    device, which = place
    if which == "auto" and device == "cpu" and set(describe(device, dtype).values()) == {"reference"}:
        pytest.skip("no faster ops are built on this machine")
    return bind_ops(device, dtype, which)


def random_weights(slots: Sequence[WeightSlot], seed: int = 0, packed: bool = False) -> dict[str, Packed]:
    """Seeded values for every slot, by name; `packed` stores what the released models pack as FP8 and FP4."""
    shapes = {slot.name: slot.shape for slot in slots}
    out = {}
    for slot in slots:
        source = np.random.default_rng([seed, *slot.name.encode()])
        if slot.kind == "index":
            out[slot.name] = _table(slot.shape, shapes[slot.name.removesuffix(".tid2eid")][0], source)
        else:
            out[slot.name] = _random(slot, source, packed)
    return out


def build_model(config: ModelConfig, weights: Mapping[str, Packed], **options: Any) -> VisionLanguageModel:
    """A model, filled; `options` as `empty_model`."""
    model = empty_model(config, **options)
    for slot in model.slots():
        slot.put(weights[slot.name])
    return model


def empty_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics = "plain",
    ops: Ops | None = None,
    expand: bool = True,
    pictures: bool = True,
    device: str = "cpu",
    host: HostSide | None = None,
) -> VisionLanguageModel:
    """A model before any weight arrives, on reference ops unless others are given; `host`: whose experts are in host
    memory."""
    bound = bind_ops(device, str(dtype).removeprefix("torch."), "reference") if ops is None else ops
    build = BuildContext(ops=bound, device=torch.device(device), dtype=dtype, expand=expand, host=host)
    return VisionLanguageModel(config, ModelOptions(build=build, numerics=numerics, images=pictures)).eval()


def small_model(seed: int = 0, *, packed: bool = False, config: ModelConfig | None = None, **options: Any) -> Any:
    """Config, weights and model in one call; `options` as `build_model`."""
    config = small_config() if config is None else config
    weights = random_weights(empty_model(config).slots(), seed, packed)
    return build_model(config, weights, **options)


def random_text(length: int, seed: int = 0, vocab_size: int = 70) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Ids 2 .. vocab_size - 1."""
    return np.random.default_rng([seed, length]).integers(2, vocab_size, length)


def prompt_with_pictures(
    pieces: Sequence[int | tuple[int, int]], config: ModelConfig, seed: int = 0, rows_seed: int = 0
) -> Tokens:
    """A prompt of text runs (a number of tokens) and pictures (leading pads, cells), with random image rows.

    A picture is PAD x lead, START, its cells with a NEWLINE, a PAD and again cells among them, END.
    """
    vocab, ids, orders = config.text.vocab_size, list[int](), []
    for number, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids += random_text(piece, seed + number, vocab).tolist()
            continue
        lead, cells = piece
        body = [2] * (cells - cells // 2) + [3, 1] + [2] * (cells // 2)
        ids += [vocab + kind for kind in [1] * lead + [0] + body + [4]]
        orders.append(np.random.default_rng([seed, number]).permutation(cells))
    total = sum(len(order) for order in orders)
    rows = torch.from_numpy(np.random.default_rng([rows_seed, total]).normal(size=(total, config.text.hidden_size)))
    return picture_tokens(ids, vocab, orders, rows.float() if total else None)


def _table(shape: tuple[int, ...], experts: int, source: np.random.Generator) -> Packed:
    """Different experts in each row."""
    table = np.stack([source.permutation(experts)[: shape[1]] for _ in range(shape[0])])
    return Packed(I64, torch.from_numpy(table.astype(np.int64)), None, shape)


def _random(slot: WeightSlot, source: np.random.Generator, packed: bool) -> Packed:
    values = torch.from_numpy(source.normal(size=slot.shape)).float() * _spread(slot)
    if slot.name.endswith("norm.weight") or slot.name.endswith(("norm1.weight", "norm2.weight")):
        values = 1 + values
    return encode(values, _format(slot, packed))


def _spread(slot: WeightSlot) -> float:
    """Standard deviation of the values: big enough that every mechanism changes the logits."""
    if slot.kind == "matrix":
        gain = 2.0 if ".experts." in slot.name or "gate" in slot.name else 1.0
        return gain if slot.name == "embed" else gain * float(slot.shape[-1]) ** -0.5
    if slot.name.endswith("_fn"):
        return float(slot.shape[-1]) ** -0.5
    return 0.3 if "norm" in slot.name else 0.7


def _format(slot: WeightSlot, packed: bool) -> Format:
    if slot.kind == "vector":
        return F32
    if packed and ".ffn.experts." in slot.name:
        return FP4
    return fp8((128, 128)) if packed and slot.name.endswith(PACKED) else BF16
