"""Consistent headers with any content either match or are refused: no other error, whatever a file claims."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from spyglass.checkpoint.match import Match, match
from spyglass.checkpoint.safetensors import DTYPE_BYTES, Checkpoint, TensorHeader
from spyglass.errors import CheckpointError
from spyglass.params.table import param_table, stored_tensors
from tests.small_models import small_config
from tests.unit.checkpoint.small_files import PACKED

SPECS = param_table(small_config(**PACKED))
SOUND = [tensor for name, spec in SPECS.items() for tensor in stored_tensors(name, spec, spec.format)]
ODD_NAMES = [
    "",
    ".",
    "layers.",
    "layers.0",
    "layers..attn.wq_a.weight",
    "layers.0.",
    "layers.00.attn.wq_a.weight",
    "layers.٣.attn.wq_a.weight",
    "layers.99999999999999999999.attn.wq_a.weight",
    "layers.0.ffn.experts.x.w1.weight",
    "layers.0.ffn.experts.0.w9.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.down_proj",
    "model.layers.1.mlp.experts.gate_up_proj_scale_inv",
    "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv",
    "model.layers.1.mlp.experts.-1.gate_proj.weight",
    "model.model.norm.weight",
    "model.norm.weight",
    "mtp.",
    "mtp.0.norm.weight",
    "lm_head.weight",
    "norm.scale",
    "embed.scale",
    "vision.",
    "\ud800",
]
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 6, 32, 48, 4096, 4097, 1 << 40]), max_size=4).map(tuple)


def header(name: str, dtype: str, shape: tuple[int, ...]) -> TensorHeader:
    nbytes = DTYPE_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return TensorHeader(name, dtype, shape, Path("model.safetensors"), 8, nbytes)


def outcome(headers: dict[str, TensorHeader]) -> Match | None:
    try:
        return match(Checkpoint(Path("folder"), headers, (), ()), SPECS)
    except CheckpointError:
        return None


def test_the_sound_one_matches() -> None:
    found = outcome({name: header(name, dtype, shape) for name, dtype, shape in SOUND})
    assert found is not None and not found.faults() and found.sources.keys() == SPECS.keys()


@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(SOUND) - 1),
            st.sampled_from(["drop", "dtype", "shape", "rename", "add"]),
            st.sampled_from(sorted(DTYPE_BYTES)),
            SHAPES,
            st.sampled_from(ODD_NAMES) | st.text(max_size=8),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_any_edit_is_told_or_harmless(edits: list[tuple[int, str, str, tuple[int, ...], str]]) -> None:
    headers = {name: header(name, dtype, shape) for name, dtype, shape in SOUND}
    for index, kind, dtype, shape, other in edits:
        name, sound_dtype, sound_shape = SOUND[index]
        if kind in ("drop", "rename"):
            headers.pop(name, None)
        if kind != "drop":
            new = other if kind in ("rename", "add") else name
            headers[new] = header(
                new,
                dtype if kind in ("dtype", "add") else sound_dtype,
                shape if kind in ("shape", "add") else sound_shape,
            )
    found = outcome(headers)
    if found is None:
        return
    used = sum(1 if source.scale is None else 2 for source in found.sources.values())
    skipped = sum(map(len, found.skipped.values()))
    if not found.faults():
        assert used + skipped >= len(headers), "every tensor is used, skipped by name, or a fault"
        assert found.sources.keys() | {name.removesuffix(".weight") for name in found.at_init} >= SPECS.keys()
