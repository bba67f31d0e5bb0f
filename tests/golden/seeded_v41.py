"""The weights of the V4.1 golden vectors (see `seeded`): seven layers of ratios 0, 0, 2, 2, 1, 1, 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from spyglass.quant.formats import BF16, F32, fp8
from tests.golden.seeded import (
    EXPERTS,
    INDEX_HEADS,
    STREAMS,
    VOCAB,
    WIDTH,
    Drawer,
    Entry,
    as_tensors,
    attention,
    experts,
    layer_begins,
    vision_entries,
)

DIGEST = "1fd92f5acbee2d081548c9da253ab4fe3af71af457bc30049adfb60f4764505a"
TABLE_ROWS = {1: 6126, 3: 6332}
COMPRESSED, UNGATED, INDEXED = (2, 4), (4,), (2, 4, 5)
DENSE, TABLE = fp8((32, 32)), fp8((1, 32))


def entries() -> Iterator[Entry]:
    """(slot name, float32 values, stored format) of every tensor, in the order in which they were drawn."""
    draw = Drawer()
    yield "embed", draw.normal(VOCAB, WIDTH, std=1e-4), BF16
    yield "head", draw.matrix(VOCAB, WIDTH, 4.0), BF16
    yield "norm.weight", draw.norm(WIDTH), BF16
    for layer in range(7):
        yield from _layer(draw, layer)
    yield from vision_entries(draw)
    for name in ("image_start", "image_end", "image_newline"):
        yield name, draw.normal(WIDTH, std=0.7), BF16


def _layer(draw: Drawer, layer: int) -> Iterator[Entry]:
    name = f"layers.{layer}."
    yield from layer_begins(draw, name)
    yield from attention(draw, f"{name}attn.", DENSE)
    yield from _memory(draw, layer, f"{name}attn.")
    yield f"{name}ffn.gate", draw.matrix(EXPERTS, WIDTH), BF16
    for bias in ("bias", "bias_vl"):
        yield f"{name}ffn.gate.{bias}", draw.normal(EXPERTS, std=0.2), F32
    yield from experts(draw, name, DENSE)
    if layer in TABLE_ROWS:
        yield f"{name}engram.embed", draw.normal(TABLE_ROWS[layer], 32, std=1.0), TABLE
        yield f"{name}engram.wkv", draw.matrix((STREAMS + 1) * WIDTH, 192), DENSE
        for weight in ("q_weight", "k_weight"):
            yield f"{name}engram.{weight}", draw.norm(STREAMS, WIDTH), BF16


def _memory(draw: Drawer, layer: int, name: str) -> Iterator[Entry]:
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


def tensors(*, packed: bool) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors: packed, or the same numbers in bfloat16."""
    return as_tensors(entries(), packed=packed)


def write(folder: Path, config: str, *, packed: bool) -> None:
    """A checkpoint folder with these weights; `config` is the text of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(packed=packed), folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    classes = [(3 + 7 * token) % 400 for token in range(VOCAB)]
    (folder / "engram_token_map.json").write_text(str(classes), encoding="utf-8")
