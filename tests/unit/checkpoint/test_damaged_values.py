"""Values that no model can use: found while reading, named, never silently computed with."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from spyglass.errors import CheckpointError
from tests.unit.checkpoint.small_files import load_all, read_raw, write_raw, write_small

E8M0_NAN, BF16_NAN, BF16_INFINITY = b"\xff", b"\xc0\x7f", b"\x80\x7f"
F32_NAN, F32_INFINITY = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))


def damage(folder: Path, name: str, value: bytes) -> None:
    """Overwrite the last value of a tensor."""
    tensors = read_raw(folder)
    raw = tensors[name]
    tensors[name] = replace(raw, data=raw.data[: -len(value)] + value)
    write_raw(folder, tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.1.ffn.gate.bias", F32_NAN),
        ("layers.1.ffn.gate.bias_vl", F32_INFINITY),
        ("layers.0.attn.attn_sink", F32_NAN),
        ("layers.1.attn.compressor.ape", F32_INFINITY),
        ("layers.0.hc_attn_fn", F32_NAN),
        ("norm.weight", BF16_NAN),
        ("image_start", BF16_INFINITY),
        ("vision.patch_embed.proj.bias", BF16_NAN),
        ("layers.0.attn.wq_a.scale", E8M0_NAN),
        ("layers.2.ffn.experts.5.w2.scale", E8M0_NAN),
    ],
)
def test_a_scale_or_plain_tensor_that_holds_no_number_is_refused_by_name(
    tmp_path: Path, name: str, value: bytes
) -> None:
    write_small(tmp_path)
    damage(tmp_path, name, value)
    with pytest.raises(CheckpointError, match=f"^{name} holds a value that is no finite number"):
        load_all(tmp_path)


def test_a_float32_scale_that_holds_no_number_is_refused_by_name(tmp_path: Path) -> None:
    write_small(tmp_path, expert_dtype="fp8")
    damage(tmp_path, "layers.0.ffn.experts.0.w1.scale", F32_INFINITY)
    with pytest.raises(CheckpointError, match=r"^layers\.0\.ffn\.experts\.0\.w1\.scale holds"):
        load_all(tmp_path)


def test_the_smallest_and_the_largest_scale_are_numbers(tmp_path: Path) -> None:
    write_small(tmp_path)
    for value in (b"\x00", b"\xfe"):
        damage(tmp_path, "layers.0.attn.wq_a.scale", value)
        load_all(tmp_path)
