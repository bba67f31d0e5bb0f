"""Golden weights, drawn again from their seed instead of being stored.

All small checkpoints of the golden vectors came from one generator, tensor after tensor in the order of `seeded_v4` and
`seeded_v41`; what the packed checkpoints store as FP8 or FP4 was drawn in float32 and then packed. A digest says
whether this machine's torch draws the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import pytest
import torch

from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, Format
from spyglass.quant.packed import Packed

SEED = 101
WIDTH, HEADS, EXPERTS, VOCAB, STREAMS, INDEX_HEADS = 128, 4, 8, 512, 4, 16
Entry = tuple[str, torch.Tensor, Format]
_SAFETENSORS = {"F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8}


class Drawer:
    """Draws in the order of the calls; a matrix has standard deviation `gain` / sqrt(inputs)."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(SEED)

    def normal(self, *shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) * std

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(rows, columns, std=gain * columns**-0.5)

    def norm(self, *shape: int) -> torch.Tensor:
        return 1 + self.normal(*shape, std=0.1)

    def hyper_scale(self, count: int = 3) -> torch.Tensor:
        return 0.5 + 0.25 * torch.rand(count, generator=self._generator)

    def skip(self, count: int) -> None:
        """Leave out numbers that something else took."""
        torch.rand(count, generator=self._generator)


def vision_entries(draw: Drawer) -> Iterator[Entry]:
    """Tower and aligner, alike in both families."""
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


def layer_begins(draw: Drawer, name: str) -> Iterator[Entry]:
    """Norms and hyper-connections of a layer."""
    for norm in ("attn_norm", "ffn_norm"):
        yield f"{name}{norm}.weight", draw.norm(WIDTH), BF16
    for part in ("hc_attn", "hc_ffn"):
        yield f"{name}{part}_fn", draw.matrix(STREAMS * (STREAMS + 2), STREAMS * WIDTH), F32
        yield f"{name}{part}_base", draw.normal(STREAMS * (STREAMS + 2), std=0.5), F32
        yield f"{name}{part}_scale", draw.hyper_scale(), F32


def attention(draw: Drawer, name: str, dense: Format) -> Iterator[Entry]:
    """The matrices of attention, without what is compressed."""
    yield f"{name}attn_sink", draw.normal(HEADS, std=1.0), F32
    yield f"{name}wq_a", draw.matrix(128, WIDTH), dense
    yield f"{name}q_norm.weight", draw.norm(128), BF16
    yield f"{name}wq_b", draw.matrix(HEADS * 512, 128), dense
    yield f"{name}wkv", draw.matrix(512, WIDTH), dense
    yield f"{name}kv_norm.weight", draw.norm(512), BF16
    yield f"{name}wo_a", draw.matrix(128, 1024), dense
    yield f"{name}wo_b", draw.matrix(WIDTH, 128), dense


def experts(draw: Drawer, name: str, dense: Format) -> Iterator[Entry]:
    """The routed experts and the shared one."""
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        stored = dense if expert == "shared_experts" else FP4
        yield f"{name}ffn.{expert}.w1", draw.matrix(128, WIDTH, 6.0), stored
        yield f"{name}ffn.{expert}.w2", draw.matrix(WIDTH, 128), stored
        yield f"{name}ffn.{expert}.w3", draw.matrix(128, WIDTH, 6.0), stored


def as_tensors(entries: Iterable[Entry], *, packed: bool) -> dict[str, torch.Tensor]:
    """Tensors under their names on disk: packed, or the same numbers in bfloat16."""
    result: dict[str, torch.Tensor] = {}
    for name, values, stored in entries:
        held = encode(values, stored)
        if not packed and stored.block is not None:
            held = Packed(BF16, decode(held, torch.bfloat16), None, held.shape)
        is_matrix = values.dim() == 2 and not name.endswith(("_fn", "_weight", "ape"))
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


def skip_unless(found: dict[str, torch.Tensor], expected: str) -> None:
    """Skip the test where the packed tensors are not those of the golden files."""
    if digest(found) != expected:
        pytest.skip("torch draws other random numbers on this machine, so the golden weights cannot be made again")
