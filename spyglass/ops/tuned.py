"""Launches that were measured on a GPU, in tables that `spyglass bench tune` writes: one file by compute capability.

A table names the best launch by op, by shape and by bucket of rows. Where it is silent the rule of the op decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from spyglass.ops import gpu

FOLDER = Path(__file__).with_name("tables")
# Bucket of rows -> the most rows of a call in it; the bucket is named by the rows that it is measured with
BUCKETS: Mapping[int, int] = {1: 1, 2: 2, 8: 8, 32: 32, 128: 128, 512: 1023, 4096: 1 << 62}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWise:
    """A launch of an op that works row by row: `at_once` rows, heads or channels of a program, and its warps."""

    at_once: int
    warps: int


def bucket(rows: int) -> int:
    """The bucket that a call of so many rows belongs to."""
    return next(name for name, most in BUCKETS.items() if rows <= most)


def find(op: str, kinds: tuple[type[Any], ...], rows: int, **shape: object) -> Any:
    """The measured launch of a call on the current GPU, one of the dataclasses `kinds`; None where there is none."""
    return _find(FOLDER, gpu.generation(), op, key(**shape), str(bucket(rows)), kinds)


def key(**shape: object) -> str:
    """How a table names a shape."""
    return " ".join(f"{name}={value}" for name, value in shape.items())


def encode(launch: object) -> Any:
    """A launch as JSON: the name of its class, and its fields."""
    if not is_dataclass(launch):
        return launch
    return {type(launch).__name__: {field.name: encode(getattr(launch, field.name)) for field in fields(launch)}}


def standing(capability: tuple[int, int]) -> str:
    """What is known of the Triton kernels on GPUs of this compute capability, in words."""
    found = 10 * capability[0] + capability[1]
    if table(FOLDER, found):
        return "measured"
    return "compiles, not run" if found in gpu.GENERATIONS else "not known"


@cache
def table(folder: Path, generation: int) -> Mapping[str, Any]:
    """The table of a compute capability (90 for 9.0); empty where none was measured."""
    path = folder / f"{generation}.json"
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


@cache
def _find(folder: Path, generation: int, op: str, shape: str, rows: str, kinds: tuple[type[Any], ...]) -> Any:
    row = table(folder, generation).get("launches", {}).get(op, {}).get(shape, {}).get(rows)
    return None if row is None else _made(row["launch"], {kind.__name__: kind for kind in kinds})


def _made(value: Any, kinds: Mapping[str, Callable[..., Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return kinds[name](**{part: _made(given, kinds) for part, given in parts.items()})
