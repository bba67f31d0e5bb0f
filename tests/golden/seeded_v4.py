"""The weights of the V4 golden vectors (see `seeded`): five layers of ratios 0, 4, 128, 4, 0, the first one hashed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
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
    skip_unless,
    vision_entries,
)

Which = Literal["vision", "text"]
DIGESTS: dict[Which, str] = {
    "vision": "95d2ed7c2a80e0c6b3c83dddc513f767e50a1a00ab90f77876ab765af1e3efea",
    "text": "0370dd60c363053b337191e630d2dd34b457f9a3c1f32fd59b810a524fd09f3f",
}
RATIOS = (0, 4, 128, 4, 0)
TABLE_DRAWS = 6979  # numbers that the table of hashed experts took
EMBED_STD: dict[Which, float] = {"vision": 1e-4, "text": 0.7}
DENSE = fp8((128, 128))


def entries(which: Which) -> Iterator[Entry]:
    """(slot name, float32 values, stored format) in the order in which they were drawn."""
    draw = Drawer()
    yield "embed", draw.normal(VOCAB, WIDTH, std=EMBED_STD[which]), BF16
    yield "head", draw.matrix(VOCAB, WIDTH, 4.0), BF16
    yield "norm.weight", draw.norm(WIDTH), BF16
    yield "hc_head_fn", draw.matrix(STREAMS, STREAMS * WIDTH), F32
    yield "hc_head_base", draw.normal(STREAMS, std=0.5), F32
    yield "hc_head_scale", draw.hyper_scale(1), F32
    for layer, ratio in enumerate(RATIOS):
        yield from _layer(draw, layer, ratio, which)
    if which == "vision":
        yield from vision_entries(draw)
        for name in ("image_start", "image_end", "image_newline", "image_pad"):
            yield name, draw.normal(WIDTH, std=0.7), BF16


def _layer(draw: Drawer, layer: int, ratio: int, which: Which) -> Iterator[Entry]:
    name = f"layers.{layer}."
    yield from layer_begins(draw, name)
    yield from _attention(draw, f"{name}attn.", ratio)
    yield f"{name}ffn.gate", draw.matrix(EXPERTS, WIDTH), BF16
    if layer == 0:
        draw.skip(TABLE_DRAWS)
    if layer > 0 or which == "vision":
        yield f"{name}ffn.gate.bias", draw.normal(EXPERTS, std=0.2), F32
    if which == "vision":
        yield f"{name}ffn.gate.bias_vl", draw.normal(EXPERTS, std=0.2), F32
    yield from experts(draw, name, DENSE)


def _attention(draw: Drawer, name: str, ratio: int) -> Iterator[Entry]:
    yield from attention(draw, name, DENSE)
    if ratio:
        yield from _compressor(draw, f"{name}compressor.", ratio, 512)
    if ratio == 4:
        yield f"{name}indexer.wq_b", draw.matrix(INDEX_HEADS * 128, 128), DENSE
        yield f"{name}indexer.weights_proj", draw.matrix(INDEX_HEADS, WIDTH), BF16
        yield from _compressor(draw, f"{name}indexer.compressor.", ratio, 128)


def _compressor(draw: Drawer, name: str, ratio: int, dim: int) -> Iterator[Entry]:
    width = 2 * dim if ratio == 4 else dim
    yield f"{name}ape", draw.normal(ratio, width, std=0.5), F32
    yield f"{name}wkv", draw.matrix(width, WIDTH), BF16
    yield f"{name}wgate", draw.matrix(width, WIDTH), BF16
    yield f"{name}norm.weight", draw.norm(dim), BF16


def tensors(which: Which, golden: Path) -> dict[str, torch.Tensor]:
    """The packed checkpoint's tensors; the table of hashed experts is the one thing that is stored."""
    found = as_tensors(entries(which), packed=True)
    found["layers.0.ffn.gate.tid2eid"] = torch.from_numpy(np.load(golden / "v4" / "tid2eid.npy").astype(np.int64))
    return found


def write(file: Path, which: Which, golden: Path) -> None:
    """The packed checkpoint in a file; skips where the numbers are not those of the golden files."""
    found = tensors(which, golden)
    skip_unless(found, DIGESTS[which])
    save_file(found, file)
