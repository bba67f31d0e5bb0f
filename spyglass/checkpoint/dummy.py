"""Weights that are drawn where they will lie instead of read: a model of any size without its files.

Speed and memory are those of the real checkpoint; the words are noise. Every tensor is copied from a small bank of
random numbers, beginning at an offset that follows from its name, so filling runs at the speed of a copy.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from spyglass.checkpoint.load import LoadReport
from spyglass.checkpoint.random import FP4_SPREAD, new_checkpoint, random_tensor
from spyglass.config.presets import PRESETS
from spyglass.config.shipped import find_model
from spyglass.errors import CheckpointError
from spyglass.params.table import Param
from spyglass.progress import Progress
from spyglass.quant.formats import Format
from spyglass.quant.packed import TORCH_DTYPES, Packed, WeightSlot, empty_packed

_BANK = 1 << 24  # elements
_SMALL = 1 << 16  # tensors up to this many elements are drawn one by one, as in a random checkpoint


def dummy_folder(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder of a model to be drawn: as `find_model`, and for the name of a preset one that holds only headers.

    That folder lies in the user's temporary directory and takes no space worth speaking of: its files are holes.
    """
    path = find_model(name_or_path)
    preset = os.fspath(name_or_path)
    if path.is_dir() or preset not in PRESETS:
        return path
    folder = Path(tempfile.gettempdir()) / f"spyglass-dummy-{os.getuid()}" / preset
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as making:
            new_checkpoint(Path(making) / preset, preset, headers_only=True)
            with contextlib.suppress(OSError):  # another process made it meanwhile
                os.rename(Path(making) / preset, folder)
    return folder


def load_dummy(
    slots: Iterable[WeightSlot],
    specs: Mapping[str, Param],
    device: torch.device,
    *,
    gate_skew: float = 0.0,
    progress: bool = True,
) -> LoadReport:
    """Fill every slot with drawn weights in the official format of its entry in `specs`.

    `gate_skew` widens the routers' choice biases: 0 leaves experts about evenly chosen; at 1 a few get most rows.

    Raises:
        CheckpointError: a slot is not in `specs`.
    """
    started, nbytes = time.perf_counter(), 0
    banks = _Banks()
    known = list(slots)
    total = sum(math.prod(slot.shape) for slot in known)
    with Progress(total=total, unit="", unit_scale=True, desc="drawing", show=progress) as bar:
        for slot in known:
            if slot.name not in specs:
                raise CheckpointError(f"no weight called {slot.name} belongs to this configuration")
            packed = _drawn(slot, specs[slot.name], banks, device)
            if slot.name.endswith("gate.bias") and gate_skew:
                packed.data.add_(torch.randn(packed.shape, generator=_seeded(slot.name)) * gate_skew)
            slot.put(packed)
            nbytes += packed.data.nbytes + (0 if packed.scale is None else packed.scale.nbytes)
            bar.update(math.prod(slot.shape))
    return LoadReport(counts={}, skipped={}, ignored_files=(), nbytes=nbytes, seconds=time.perf_counter() - started)


def _drawn(slot: WeightSlot, spec: Param, banks: _Banks, device: torch.device) -> Packed:
    if spec.kind == "index" or math.prod(slot.shape) <= _SMALL:
        return random_tensor(slot.name, spec, seed=0)
    placed = None if slot.place is None else slot.place(spec.format)
    packed = empty_packed(spec.format, slot.shape, device) if placed is None else placed
    banks.fill(slot.name, packed)
    return packed


def _seeded(name: str) -> torch.Generator:
    """What is drawn depends on the name alone: processes that divide a model must have the same of what all have."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


class _Banks:
    """Banks of random numbers by storage dtype, and of scales by exponent, on each device that weights lie on."""

    def __init__(self) -> None:
        self._drawn: dict[object, torch.Tensor] = {}

    def fill(self, name: str, packed: Packed) -> None:
        """Copy from the bank of the weight's format; scales give every row of the product a spread of about 1."""
        inputs, format, device = packed.shape[-1], packed.format, packed.data.device
        _repeat(self._codes(format, device), packed.data, name)
        if format.block is None:
            packed.data.mul_(1.0 if name == "embed" else 1 / math.sqrt(inputs))
            return
        code_spread = FP4_SPREAD if format.name == "fp4" else 1.0
        exponent = round(-math.log2(code_spread * math.sqrt(inputs)))
        assert packed.scale is not None
        if packed.scale.dtype == torch.uint8:
            _repeat(self._scales(exponent, device), packed.scale, name)
        else:
            packed.scale.fill_(2.0**exponent)

    def _codes(self, format: Format, device: torch.device) -> torch.Tensor:
        def draw(generator: torch.Generator) -> torch.Tensor:
            dtype = TORCH_DTYPES[format.weight_dtype]
            if format.name == "fp4":
                return torch.empty(_BANK, dtype=dtype).random_(0, 256, generator=generator)
            return torch.randn(_BANK, generator=generator).to(dtype)

        return self._bank(format.weight_dtype, device, draw)

    def _scales(self, exponent: int, device: torch.device) -> torch.Tensor:
        """Bytes of e8m0: this power of two, or half of it."""

        def draw(generator: torch.Generator) -> torch.Tensor:
            return torch.empty(_SMALL, dtype=torch.uint8).random_(exponent + 126, exponent + 128, generator=generator)

        return self._bank(f"scale {exponent}", device, draw)

    def _bank(self, name: str, device: torch.device, draw: Callable[[torch.Generator], torch.Tensor]) -> torch.Tensor:
        """Drawn on the host, so that weights are the same wherever they lie."""
        if (name, device) not in self._drawn:
            self._drawn[name, device] = draw(_seeded(name)).to(device)
        return self._drawn[name, device]


def _repeat(bank: torch.Tensor, out: torch.Tensor, name: str) -> None:
    """Fill `out` with the bank again and again, beginning at an offset that depends on the name."""
    flat, bank_bytes = out.view(-1).view(torch.uint8), bank.view(torch.uint8)
    offset = zlib.crc32(name.encode()) % (len(bank_bytes) // 2) // 64 * 64
    for first in range(0, len(flat), len(bank_bytes) - offset):
        part = flat[first : first + len(bank_bytes) - offset]
        part.copy_(bank_bytes[offset : offset + len(part)])
