"""Where the files of a folder say that they come from: parts of two releases load like one and answer nonsense.

Three kinds of notes are read, each compared with its own kind: metadata in shard headers, what the hub's client wrote
down beside its downloads, and links into its snapshots. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from spyglass.checkpoint.safetensors import Checkpoint, list_names

_BESIDE = ("config.json", "model.safetensors.index.json", "tokenizer.json")  # what decides with the shards
_KEYS = ("revision", "commit", "commit_hash", "_commit_hash", "git_commit", "sha")
_METADATA = b'"__metadata__":'
_MAX_HEADER, _MAX_NOTE, _MAX_LINKS = 1 << 20, 4096, 8
_SNAPSHOT = re.compile(r"/snapshots/([0-9A-Za-z._-]+)/")


def mixed_revisions(checkpoint: Checkpoint) -> list[str]:
    """One line for each kind of note by which the files are of more than one revision; empty when none says so."""
    files = [*checkpoint.files, *(checkpoint.directory / name for name in _BESIDE)]
    kinds: tuple[tuple[str, Iterable[Path], Callable[[Path], str | None]], ...] = (
        ("the metadata in their headers", checkpoint.files, _stated),
        ("the hub client's notes", files, _downloaded),
        ("the snapshots that they are links into", files, _linked),
    )
    return [line for words, named, revision_of in kinds if (line := _compared(words, named, revision_of))]


def _compared(words: str, files: Iterable[Path], revision_of: Callable[[Path], str | None]) -> str | None:
    found: dict[str, list[str]] = {}
    for file in files:
        if (revision := revision_of(file)) is not None:
            found.setdefault(revision[:40], []).append(file.name)
    if len(found) < 2:
        return None
    parts = "; ".join(f"{revision}: {list_names(names)}" for revision, names in found.items())
    return f"by {words} the files are of {len(found)} revisions ({parts}); fetch all of one revision"


def _stated(file: Path) -> str | None:
    """The revision in a header's metadata, which stands at its beginning."""
    try:
        with open(file, "rb") as stream:
            raw = stream.read(8 + _MAX_HEADER)[8:]
    except OSError:
        return None
    start = raw.find(_METADATA)
    if start < 0:
        return None
    try:
        values, _ = json.JSONDecoder().raw_decode(raw[start + len(_METADATA) :].decode("utf-8", "replace").lstrip())
    except (ValueError, RecursionError):
        return None
    return next((values[key] for key in _KEYS if isinstance(values, dict) and values.get(key)), None)


def _downloaded(file: Path) -> str | None:
    """The first line of `.cache/huggingface/download/NAME.metadata`, which is the commit."""
    note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        with open(note, encoding="utf-8") as stream:
            return stream.read(_MAX_NOTE).partition("\n")[0].strip() or None
    except (OSError, ValueError):
        return None


def _linked(file: Path) -> str | None:
    """The snapshot that a file, or a link on the way to it, lies in."""
    place = os.path.abspath(file)
    for _ in range(_MAX_LINKS):
        if found := _SNAPSHOT.search(place):
            return found[1]
        if not os.path.islink(place):
            return None
        place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
    return None
