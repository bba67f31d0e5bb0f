"""Cuts the op vectors out of the full golden sets.

    python -m scripts.golden.ops FOLDER

FOLDER holds gate.npz and index.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "ops"
ROUTERS = ("0", "1", "3", "4")  # both sizes, with and without a table
QUERIES = slice(0, 16)


def main(source: Path) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    with np.load(source / "gate.npz") as found:
        gate = {key: found[key] for key in found if key.split(".")[0] in ROUTERS}
    integers = {key: value.astype(np.int32) for key, value in gate.items() if value.dtype == np.int64}
    np.savez_compressed(DATA / "gate.npz", **(gate | integers))
    with np.load(source / "index.npz") as found:
        index = {key: found[key] if key == "k" else found[key][QUERIES] for key in found}
    np.savez_compressed(DATA / "index.npz", **index)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
