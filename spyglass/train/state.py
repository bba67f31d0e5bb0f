"""A training run on disk, so that it can stop anywhere: tensors in safetensors files of at most 16 MB, and JSON.

A state is a folder that gets its name once it is complete, and only then does the one before go: a run that is killed
at any moment leaves a whole state behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from spyglass.errors import CheckpointError, ConfigError

MOST_BYTES = 16_000_000
_ENTRY_BYTES = 160  # of a file's header per piece, without its name
_FACTS = "state.json"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run after `step` steps: tensors by name, and `facts` that JSON can hold."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]


def save_state(folder: Path, state: State) -> Path:
    """Write `folder/step-<number>` and remove older states; the result is the new folder.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; older states are then still there.
    """
    target = folder / f"step-{state.step:08d}"
    partial = target.with_name(target.name + _PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        shapes = {name: list(tensor.shape) for name, tensor in state.tensors.items()}
        for number, part in enumerate(_files(state.tensors)):
            (partial / f"part-{number:04d}.safetensors").write_bytes(safetensors.torch.save(part))
        facts = {"step": state.step, "shapes": shapes, "facts": dict(state.facts)}
        (partial / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        to_disk(partial)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)  # what was written would keep the disk full
        raise CheckpointError(
            f"the training state {target} cannot be written: {error}; free the disk and resume"
        ) from None
    for other in folder.glob("step-*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)
    return target


@contextlib.contextmanager
def held_alone(folder: Path) -> Iterator[None]:
    """No other process that asks for it trains in this folder meanwhile, where the system has locks (not on Windows).

    Raises:
        ConfigError: another does.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process trains in {folder}; wait for it, or choose another folder"
                ) from None
        yield
    finally:
        os.close(descriptor)


def has_state(folder: Path) -> bool:
    """Whether there is a complete state below `folder`."""
    return bool(_states(folder))


def load_state(folder: Path) -> State | None:
    """The newest complete state below `folder`, tensors on the host; None if there is none.

    Raises:
        CheckpointError: the state is damaged.
    """
    found = _states(folder)
    if not found:
        return None
    newest = found[-1]
    try:
        facts = json.loads((newest / _FACTS).read_text(encoding="utf-8"))
        pieces: dict[str, torch.Tensor] = {}
        for path in sorted(newest.glob("part-*.safetensors")):
            pieces |= safetensors.torch.load_file(path)
        tensors = {name: _joined(pieces, name, shape) for name, shape in facts["shapes"].items()}
        return State(step=facts["step"], tensors=tensors, facts=facts["facts"])
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the training state {newest} is damaged ({error}); remove it and start again") from None


def _states(folder: Path) -> list[Path]:
    """Complete states, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.name.endswith(_PARTIAL))


def _files(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Pieces of flat tensors, file by file."""
    part: dict[str, torch.Tensor] = {}
    used = 0
    for name, piece in _pieces(tensors):
        size = piece.nbytes + len(name) + _ENTRY_BYTES
        if part and used + size > MOST_BYTES:
            yield part
            part, used = {}, 0
        part[name] = piece
        used += size
    if part:
        yield part


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().reshape(-1)
        longest = (MOST_BYTES - len(name) - 2 * _ENTRY_BYTES) // flat.element_size()
        for number, piece in enumerate(flat.split(longest)):
            yield f"{name}#{number}", piece.clone()  # a file may not hold two views of one memory


def _joined(pieces: Mapping[str, torch.Tensor], name: str, shape: list[int]) -> torch.Tensor:
    parts = [pieces[f"{name}#0"]]
    while (piece := pieces.get(f"{name}#{len(parts)}")) is not None:
        parts.append(piece)
    return torch.cat(parts).view(shape)


def to_disk(folder: Path) -> None:
    """Make the files survive a loss of power before the folder gets its name."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some file systems cannot sync folders
            os.fsync(descriptor)
        os.close(descriptor)
