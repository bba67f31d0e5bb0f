"""The weights of the V4.1 golden vectors, drawn again from their seed instead of being stored.

One generator, tensor after tensor; matrices that the packed checkpoint stores as FP8 (32x32 blocks) or FP4 are drawn in
float32 and then packed. `DIGEST` is that of the original packed file's tensors: a machine whose torch draws other
numbers notices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, Format, fp8
from spyglass.quant.packed import Packed

SEED = 101
DIGEST = "1fd92f5acbee2d081548c9da253ab4fe3af71af457bc30049adfb60f4764505a"
WIDTH, HEADS, EXPERTS, VOCAB, STREAMS, INDEX_HEADS = 128, 4, 8, 512, 4, 16
TABLE_ROWS = {1: 6126, 3: 6332}
COMPRESSED, UNGATED, INDEXED = (2, 4), (4,), (2, 4, 5)
DENSE, TABLE = fp8((32, 32)), fp8((1, 32))
_SAFETENSORS = {"F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


class _Drawer:
    """Draws in the order of the calls; std is 1 / sqrt(inputs) times `gain` unless given."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * std

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(rows, columns, std=gain * columns**-0.5)

    def norm(self, *shape: int) -> torch.Tensor:
        return 1 + self.normal(*shape, std=0.1)

    def hyper_scale(self) -> torch.Tensor:
        return 0.5 + 0.25 * torch.rand(3, generator=self._generator)


def entries() -> Iterator[tuple[str, torch.Tensor, Format]]:
    """(slot name, float32 values, stored format) of every tensor, in the order in which they were drawn."""
    draw = _Drawer()
    yield "embed", draw.normal(VOCAB, WIDTH, std=1e-4), BF16
    yield "head", draw.matrix(VOCAB, WIDTH, 4.0), BF16
    yield "norm.weight", draw.norm(WIDTH), BF16
    for layer in range(7):
        yield from _layer(draw, layer)
    yield from _vision(draw)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, draw.normal(WIDTH, std=0.7), BF16


def _layer(draw: _Drawer, layer: int) -> Iterator[tuple[str, torch.Tensor, Format]]:
    name = f"layers.{layer}."
    for norm in ("attn_norm", "ffn_norm"):
        yield f"{name}{norm}.weight", draw.norm(WIDTH), BF16
    for part in ("hc_attn", "hc_ffn"):
        yield f"{name}{part}_fn", draw.matrix(STREAMS * (STREAMS + 2), STREAMS * WIDTH), F32
        yield f"{name}{part}_base", draw.normal(STREAMS * (STREAMS + 2), std=0.5), F32
        yield f"{name}{part}_scale", draw.hyper_scale(), F32
    yield f"{name}attn.attn_sink", draw.normal(HEADS, std=1.0), F32
    yield f"{name}attn.wq_a", draw.matrix(128, WIDTH), DENSE
    yield f"{name}attn.q_norm.weight", draw.norm(128), BF16
    yield f"{name}attn.wq_b", draw.matrix(HEADS * 512, 128), DENSE
    yield f"{name}attn.wkv", draw.matrix(512, WIDTH), DENSE
    yield f"{name}attn.kv_norm.weight", draw.norm(512), BF16
    yield f"{name}attn.wo_a", draw.matrix(128, 1024), DENSE
    yield f"{name}attn.wo_b", draw.matrix(WIDTH, 128), DENSE
    yield from _memory(draw, layer, f"{name}attn.")
    yield f"{name}ffn.gate", draw.matrix(EXPERTS, WIDTH), BF16
    for bias in ("bias", "bias_vl"):
        yield f"{name}ffn.gate.{bias}", draw.normal(EXPERTS, std=0.2), F32
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        stored = DENSE if expert == "shared_experts" else FP4
        yield f"{name}ffn.{expert}.w1", draw.matrix(128, WIDTH, 6.0), stored
        yield f"{name}ffn.{expert}.w2", draw.matrix(WIDTH, 128), stored
        yield f"{name}ffn.{expert}.w3", draw.matrix(128, WIDTH, 6.0), stored
    if layer in TABLE_ROWS:
        yield f"{name}engram.embed", draw.normal(TABLE_ROWS[layer], 32, std=1.0), TABLE
        yield f"{name}engram.wkv", draw.matrix((STREAMS + 1) * WIDTH, 192), DENSE
        for weight in ("q_weight", "k_weight"):
            yield f"{name}engram.{weight}", draw.norm(STREAMS, WIDTH), BF16


def _memory(draw: _Drawer, layer: int, name: str) -> Iterator[tuple[str, torch.Tensor, Format]]:
    """Compressor and indexer of the layers that have them."""
    if layer in COMPRESSED:
        yield f"{name}compressor.norm.weight", draw.norm(512), BF16
        yield f"{name}compressor.wkv", draw.matrix(512, WIDTH), BF16
        if layer not in UNGATED:
            yield f"{name}compressor.wgate", draw.matrix(512, WIDTH), BF16
    if layer in INDEXED:
        yield f"{name}indexer.wq_b", draw.matrix(INDEX_HEADS * 128, 128), DENSE
        yield f"{name}indexer.weights_proj", draw.matrix(INDEX_HEADS, WIDTH), BF16
    if layer in COMPRESSED:
        yield f"{name}indexer.wk", draw.matrix(128, 512), BF16
        yield f"{name}indexer.k_norm.weight", draw.norm(128), BF16


def _vision(draw: _Drawer) -> Iterator[tuple[str, torch.Tensor, Format]]:
    yield "vision.patch_embed.proj", draw.matrix(128, 588), BF16
    yield "vision.patch_embed.proj.bias", draw.normal(128, std=0.05), BF16
    for block in range(2):
        name = f"vision.blocks.{block}."
        for norm in ("norm1", "norm2"):
            yield f"{name}{norm}.weight", draw.norm(128), BF16
        for part, rows in (("attn.wqkv", 384), ("attn.wo", 128)):
            yield f"{name}{part}", draw.matrix(rows, 128), BF16
            yield f"{name}{part}.bias", draw.normal(rows, std=0.05), BF16
        yield f"{name}mlp.w1", draw.matrix(512, 128), BF16
        yield f"{name}mlp.w2", draw.matrix(128, 256), BF16
    yield "vision.norm.weight", draw.norm(128), BF16
    for part, columns in (("aligner.w1", 1152), ("aligner.w2", 128)):
        yield part, draw.matrix(128, columns), BF16
        yield f"{part}.bias", draw.normal(128, std=0.05), BF16


def tensors(*, packed: bool) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors under their names on disk: packed, or the same numbers in bfloat16."""
    result: dict[str, torch.Tensor] = {}
    for name, values, stored in entries():
        held = encode(values, stored)
        if not packed and stored.block is not None:
            held = Packed(BF16, decode(held, torch.bfloat16), None, held.shape)
        is_matrix = values.dim() == 2 and not name.endswith(("_fn", "_weight"))
        result[f"{name}.weight" if is_matrix else name] = _as_file(held.data, held.format.weight_dtype)
        if held.scale is not None:
            assert held.format.scale_dtype is not None
            result[f"{name}.scale"] = _as_file(held.scale, held.format.scale_dtype)
    return result


def _as_file(data: torch.Tensor, dtype: str) -> torch.Tensor:
    return data.view(_SAFETENSORS[dtype]) if dtype in _SAFETENSORS else data


def digest(found: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes, in the order of names."""
    result = hashlib.sha256()
    for name in sorted(found):
        result.update(name.encode() + found[name].contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def write(folder: Path, config: str, *, packed: bool) -> None:
    """A checkpoint folder with these weights; `config` is the text of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(packed=packed), folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    classes = [(3 + 7 * token) % 400 for token in range(VOCAB)]
    (folder / "engram_token_map.json").write_text(str(classes), encoding="utf-8")
