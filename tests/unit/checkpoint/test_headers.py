"""A file is refused by name before anything is allocated for it, whatever its header says."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.checkpoint.safetensors import DTYPE_BYTES, INDEX_NAME, MAX_HEADER_BYTES, open_checkpoint, read_header
from spyglass.errors import CheckpointError
from tests.unit.checkpoint.small_files import write_file

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F8_E8M0", "shape": [5], "data_offsets": [24, 29]},
    "empty": {"dtype": "I64", "shape": [0, 7], "data_offsets": [29, 29]},
}
DATA = bytes(range(29))


def test_a_sound_file_is_described_in_absolute_bytes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_file(file, GOOD, DATA)
    headers = read_header(file)
    assert list(headers) == ["a", "b", "empty"]
    assert (headers["a"].dtype, headers["a"].shape, headers["a"].nbytes) == ("F32", (2, 3), 24)
    content = file.read_bytes()
    assert content[headers["b"].start : headers["b"].start + headers["b"].nbytes] == DATA[24:]
    assert headers["empty"].nbytes == 0


def entry(**changes: Any) -> dict[str, Any]:
    return {**GOOD, "a": {**GOOD["a"], **changes}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(shape=[2, 4]), "needs 32 bytes"),
        (entry(dtype="BF16"), "needs 12 bytes"),
        (entry(dtype="F7"), "has dtype 'F7'; known are"),
        (entry(dtype=["F32"]), "has dtype"),
        (entry(shape=[-2, -3]), "expected a list"),
        (entry(shape=[2.0, 3.0]), "expected a list"),
        (entry(shape=[True, 6]), "expected a list"),
        (entry(shape=[1 << 64, 0]), "expected a list"),
        (entry(shape=[1] * 9), "at most 8 sizes"),
        (entry(shape="23"), "expected a list"),
        (entry(data_offsets=[0, 24, 29]), r"expected \[begin, end\]"),
        (entry(data_offsets=[24, 0]), "differ"),
        (entry(data_offsets=[-24, 0]), r"expected \[begin, end\]"),
        (entry(extra=1), "exactly dtype, shape and data_offsets"),
        ({**GOOD, "a": {"dtype": "F32", "shape": [2, 3]}}, "exactly dtype, shape and data_offsets"),
        ({**GOOD, "a": [1]}, "exactly dtype, shape and data_offsets"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [20, 25]}}, "'b' overlaps"),
        ({**GOOD, "b": {**GOOD["b"], "data_offsets": [24, 29]}, "c": GOOD["b"]}, "'c' overlaps"),
        ({key: value for key, value in GOOD.items() if key != "a"}, "'b' leaves a gap"),
        ({key: value for key, value in GOOD.items() if key not in ("b", "empty")}, "longer than its header says"),
        ({**GOOD, "c": {"dtype": "U8", "shape": [9], "data_offsets": [29, 38]}}, "truncated"),
        ({**GOOD, "__metadata__": {"format": 1}}, "__metadata__"),
        ({**GOOD, "__metadata__": "pt"}, "__metadata__"),
        ([GOOD], "must be a JSON object"),
        (b'{"a": {}', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"x": 1, "x": 2}', "names twice: x"),
        (b'{"a": {"dtype": "U8", "dtype": "I8", "shape": [], "data_offsets": [0, 0]}}', "names twice: dtype"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=str,
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path: Path, header: Any, message: str) -> None:
    file = tmp_path / "bad.safetensors"
    write_file(file, header, DATA)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, struct.pack("<Q", 1), b"PK\x03\x04" * 8, b"\xff" * 64])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="not a safetensors file or is truncated"):
        read_header(file)


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "folder.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.safetensors")


@pytest.mark.parametrize(
    ("length", "size"), [(90_000_000, 10), (MAX_HEADER_BYTES + 1, 200 << 20), (1 << 40, 10), ((1 << 64) - 1, 200 << 20)]
)
def test_an_announced_header_is_not_allocated_before_it_is_known_to_exist(
    tmp_path: Path, length: int, size: int
) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(file, size)  # a hole: takes no room
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="truncated"):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 66) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BYTES, "F12", None]) | JSON,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | JSON,
    },
    optional={"extra": JSON},
)


@given(header=st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=4) | JSON, data=st.binary(max_size=40))
def test_any_header_is_either_consistent_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    write_file(file, header, data)
    check_consistent_or_refused(file)


@given(position=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_any_flipped_byte_or_cut_is_either_harmless_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, byte: int, cut: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "flip.safetensors"
    write_file(file, GOOD, DATA)
    content = bytearray(file.read_bytes())
    content[position % len(content)] = byte
    file.write_bytes(content[: len(content) - cut % 40] if cut % 3 == 0 else content)
    check_consistent_or_refused(file)


def check_consistent_or_refused(file: Path) -> None:
    tracemalloc.start()
    try:
        headers = read_header(file)
    except CheckpointError:
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20
    raw_length = struct.unpack("<Q", file.read_bytes()[:8])[0]
    covered = sorted((header.start, header.start + header.nbytes) for header in headers.values())
    ends = [8 + raw_length, *(end for _, end in covered)]
    assert [start for start, _ in covered] == ends[:-1] and ends[-1] == file.stat().st_size
    assert set(headers) == set(json.loads(file.read_bytes()[8 : 8 + raw_length])) - {"__metadata__"}


HOSTILE = {
    "tensors": lambda count: (
        b"{%s}"
        % b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % number for number in range(count))
    ),
    "lists": lambda count: b'{"a":[%s[]]}' % (b"[]," * count * 8),
    "nested lists": lambda count: b'{"a":%s%s}' % (b"[" * count * 8, b"]" * count * 8),
    "texts": lambda count: b'{"a":{"shape":[%s""]}}' % (b'"",' * count * 16),
    "a long name": lambda count: b'{"%s":1}' % (b"a" * count * 1000),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_h11_a_header_with_more_than_the_model_can_have_is_refused_before_anything_is_made_of_it(
    what: str, tmp_path: Path
) -> None:
    raw = HOSTILE[what](20_000)
    for name in ("model.safetensors", INDEX_NAME):
        (tmp_path / name).write_bytes(raw if name == INDEX_NAME else struct.pack("<Q", len(raw)) + raw)
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=f"{name} lists far more than the 5,000 tensors"):
            open_checkpoint(tmp_path, 5000)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(raw) + (1 << 20), "the bytes themselves and no values"
        tracemalloc.stop()


def test_a_name_of_megabytes_is_named_by_its_beginning(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"n" * 50_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b"")
    with pytest.raises(CheckpointError, match="a name of 50,000 characters") as caught:
        read_header(tmp_path / "x.safetensors")
    assert len(str(caught.value)) < 1000
