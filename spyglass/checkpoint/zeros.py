"""Files that were made at their full size and never filled: a download cut off, whose rest reads as zeros. Torch-free.

Headers and sizes are right then, so values must be looked at. To read them all would take as long as to load; of each
file `_SAMPLES` places are read, spread evenly over the bytes of its matrices, 512 bytes at each. A run of `_RUN` places
with nothing but zeros, an eighth of the file, is no weight of any model: packed or not, some byte of 512 is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spyglass.checkpoint.safetensors import Checkpoint, TensorHeader
from spyglass.errors import CheckpointError
from spyglass.params.hf_names import to_native
from spyglass.params.table import component_of

_SAMPLES, _RUN = 64, 8
_SAMPLE_BYTES = 512
_MIN_TENSOR, _MIN_FILE = 4096, 1 << 16  # bytes: below, a sample would be most of what there is
_PACKED_OR_PLAIN = ("BF16", "F32", "F8_E4M3", "I8", "U8")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroStretch:
    """Bytes of a file between which no value was found; `whole`: that is everywhere, as in a folder of headers."""

    file: Path
    first: int
    last: int
    whole: bool

    def __str__(self) -> str:
        return (
            f"{self.file} is zeros from about byte {self.first:,} to {self.last:,}, as a download is that was cut off; "
            "download it again"
        )


def zero_stretches(checkpoint: Checkpoint) -> list[ZeroStretch]:
    """Those of the files of which a long stretch is zeros, one each.

    Raises:
        CheckpointError: a file cannot be read.
    """
    by_file: dict[Path, list[TensorHeader]] = {}
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) > 1 and tensor.nbytes >= _MIN_TENSOR and tensor.dtype in _PACKED_OR_PLAIN:
            if component_of(to_native(tensor.name)) != "engram":  # rows of tables may never have been learnt
                by_file.setdefault(tensor.file, []).append(tensor)
    found = [_stretch(file, tensors) for file, tensors in by_file.items()]
    return [stretch for stretch in found if stretch is not None]


def _stretch(file: Path, tensors: list[TensorHeader]) -> ZeroStretch | None:
    """The first run of samples that are zeros, if it is long."""
    if sum(tensor.nbytes for tensor in tensors) < _MIN_FILE:
        return None
    run = list[int]()
    try:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            for place in _places(tensors):
                zero = not any(os.pread(descriptor, _SAMPLE_BYTES, place))
                if not zero and len(run) >= _RUN:
                    break
                run = [*run, place] if zero else []
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if len(run) < _RUN:
        return None
    return ZeroStretch(file=file, first=run[0], last=run[-1] + _SAMPLE_BYTES, whole=len(run) == _SAMPLES)


def _places(tensors: Iterable[TensorHeader]) -> Iterable[int]:
    """Where samples begin: the middle of each of `_SAMPLES` equal parts of all bytes, within its tensor."""
    ordered = sorted(tensors, key=lambda tensor: tensor.start)
    step = sum(tensor.nbytes for tensor in ordered) / _SAMPLES
    before, number = 0, 0
    for tensor in ordered:
        while number < _SAMPLES and (offset := int((number + 0.5) * step) - before) < tensor.nbytes:
            yield tensor.start + min(offset, tensor.nbytes - _SAMPLE_BYTES)
            number += 1
        before += tensor.nbytes
