"""Seeded random checkpoints in the official layout: every mechanism at work, activations of ordinary size.

Each tensor depends on the seed and its name alone, so any file can be made by itself. Matrices are drawn in their
packed form and decoded when bfloat16 is wanted: both formats of one seed are the same model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from spyglass.checkpoint.layout import Layout, Spelling
from spyglass.checkpoint.save import SaveItem, save_checkpoint, save_headers
from spyglass.checkpoint.tokenizer import write_tokenizer
from spyglass.config import parse_model_config
from spyglass.config.presets import Preset, preset_config
from spyglass.errors import CheckpointError
from spyglass.params.table import Param, draft_params, param_table
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, Format
from spyglass.quant.packed import Packed

SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0}  # of the release (spec v4 9.8)
RANDOM_WEIGHTS = "spyglass_random_weights"  # key of config.json that says so; nothing is computed from it
FP4_SPREAD = math.sqrt(sum(value**2 for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)  # of codes drawn evenly
_DRAWN_VALUES = 1 << 22


def new_checkpoint(
    directory: str | Path,
    preset: Preset,
    *,
    seed: int = 0,
    format: Literal["packed", "bf16"] = "packed",
    names: Spelling = "native",
    headers_only: bool = False,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> Layout:
    """Write config, generation config, tokenizer and weights of a preset.

    `headers_only` writes sparse files with exact headers and sizes, for planning. The config is written last: a folder
    with one is complete.

    Raises:
        CheckpointError: the folder already holds a checkpoint, the disk is too small, or a write fails.
    """
    directory = Path(directory)
    if os.path.lexists(directory / "config.json"):
        raise CheckpointError(f"{directory} already holds a checkpoint; choose another folder or remove it")
    specs = preset_tensors(preset)
    plain = format == "bf16"
    formats = {
        name: BF16 if plain and spec.kind in ("matrix", "table") else spec.format for name, spec in specs.items()
    }
    if headers_only:
        layout = save_headers(directory, [(name, spec, formats[name]) for name, spec in specs.items()], names=names)
    else:
        items = [random_item(name, spec, seed=seed, format=formats[name]) for name, spec in specs.items()]
        layout = save_checkpoint(directory, items, names=names, progress=progress)
    config = preset_config(preset, packed=not plain)
    write_tokenizer(directory, parse_model_config(config, f"preset {preset}"))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    _write_json(directory / "generation_config.json", ids | SAMPLING)
    _write_json(directory / "config.json", config | {RANDOM_WEIGHTS: True})
    return layout


def preset_tensors(preset: Preset) -> dict[str, Param]:
    """Every entry of a preset, draft stages included, with its packed official format."""
    config = parse_model_config(preset_config(preset, packed=True), f"preset {preset}")
    specs = param_table(config)
    return specs | draft_params(config, "dspark") if config.num_draft_layers else specs


def random_item(name: str, spec: Param, *, seed: int, format: Format) -> SaveItem:
    """One entry of a random checkpoint, drawn when it is written; its values do not depend on `format`."""

    def make() -> Packed:
        packed = random_tensor(name, spec, seed=seed)
        if packed.format == format:
            return packed
        return Packed(format, decode(packed, torch.bfloat16), None, spec.shape)

    return SaveItem(name, spec, format, make)


def random_tensor(name: str, spec: Param, *, seed: int) -> Packed:
    """The entry `name` of the checkpoint with this seed, in its official format."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    if spec.kind == "index":
        return _expert_table(spec, generator)
    if spec.kind == "table" and spec.format.name == "fp8":
        return _engram_table(spec, generator)
    if spec.format.name == "fp4":
        return _fp4_matrix(spec, generator)
    if spec.format.block is None and len(spec.shape) == 2:
        return _plain_matrix(name, spec, generator)
    return encode(_values(name, spec.shape, generator), spec.format)


def _plain_matrix(name: str, spec: Param, generator: torch.Generator) -> Packed:
    """Drawn some rows at a time: the embedding of a large preset would need gigabytes of float32."""
    data = torch.empty(spec.shape, dtype=torch.bfloat16 if spec.format == BF16 else torch.float32)
    for rows in data.split(max(_DRAWN_VALUES // spec.shape[1], 1)):
        rows.copy_(_values(name, tuple(rows.shape), generator))
    return Packed(spec.format, data, None, spec.shape)


def _fp4_matrix(spec: Param, generator: torch.Generator) -> Packed:
    """Codes drawn evenly, scales of two neighbouring sizes: standard deviation about 1/sqrt(inputs)."""
    rows, columns = spec.format.storage_shape(spec.shape)
    codes = torch.empty((rows, columns), dtype=torch.uint8).random_(0, 256, generator=generator)
    exponent = round(math.log2(1.0 / (FP4_SPREAD * math.sqrt(spec.shape[-1])))) + 127
    scale_shape = spec.format.scale_shape(spec.shape)
    assert scale_shape is not None
    scale = torch.empty(scale_shape, dtype=torch.uint8).random_(exponent - 1, exponent + 1, generator=generator)
    return Packed(spec.format, codes, scale, spec.shape)


def _engram_table(spec: Param, generator: torch.Generator) -> Packed:
    """Normal values from a table of 256 quantiles, so that gigabytes need no float32; scales of two sizes."""
    quantiles = torch.special.ndtri((torch.arange(256) + 0.5) / 256).to(torch.float8_e4m3fn)
    data = torch.empty(spec.shape, dtype=torch.uint8).random_(0, 256, generator=generator)
    for rows in data.split(max(_DRAWN_VALUES // spec.shape[1], 1)):
        rows.copy_(quantiles.view(torch.uint8)[rows.int()])
    scale_shape = spec.format.scale_shape(spec.shape)
    assert scale_shape is not None
    scale = torch.empty(scale_shape, dtype=torch.uint8).random_(126, 128, generator=generator)
    return Packed(spec.format, data.view(torch.float8_e4m3fn), scale, spec.shape)


def _expert_table(spec: Param, generator: torch.Generator) -> Packed:
    """`tid2eid` [V, K]: K different experts for every token id."""
    rows, chosen = spec.shape
    topk_indices = torch.rand((rows, spec.num_experts), generator=generator).topk(chosen, dim=1).indices
    return Packed(spec.format, topk_indices, None, spec.shape)


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Float32 values of a tensor that is not drawn packed.

    Matrices keep the size of what they multiply, norms and mixing weights scatter around the neutral value, biases are
    large enough to change some of the choices.
    """
    noise = torch.randn(shape, generator=generator)
    tail = name.removesuffix(".weight").rpartition(".")[2]
    if tail in _CENTRED:
        centre, spread = _CENTRED[tail]
        return centre + spread * noise
    if tail.endswith("norm") or tail in ("norm1", "norm2", "q_weight", "k_weight"):
        return 1.0 + 0.1 * noise
    if tail.startswith("hc_"):
        return _hyper_values(tail, noise)
    return noise / math.sqrt(shape[-1])


_CENTRED = {
    "embed": (0.0, 1.0),
    "image_start": (0.0, 1.0),
    "image_end": (0.0, 1.0),
    "image_newline": (0.0, 1.0),
    "image_pad": (0.0, 1.0),
    "attn_sink": (0.0, 1.0),
    "ape": (0.0, 0.5),
    "bias": (0.0, 0.1),
    "bias_vl": (0.0, 0.1),
}


def _hyper_values(tail: str, noise: torch.Tensor) -> torch.Tensor:
    """Mixing weights around what leaves streams as they are: pre near 1/M, post near 1, comb near the identity."""
    if tail.endswith("_fn"):
        return noise / math.sqrt(noise.shape[-1])
    if tail.endswith("_scale"):
        return 0.5 * torch.exp(0.2 * noise)
    streams = len(noise) if tail == "hc_head_base" else math.isqrt(len(noise) + 1) - 1
    centre = torch.zeros_like(noise)
    centre[:streams] = -math.log(max(streams - 1, 1))
    if tail != "hc_head_base":
        centre[2 * streams :] = 2.0 * torch.eye(streams).flatten()
    return centre + 0.3 * noise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
