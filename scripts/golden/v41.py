"""Cuts the V4.1 test vectors out of the full golden sets; kept to show where each number came from.

    python -m scripts.golden.v41 FOLDER

FOLDER holds `v41`, `v41-sparse` (goldens.npz) and the weights, which are drawn again by `seeded_v41`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden_case import COLUMNS

DATA = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "v41"


def main(source: Path) -> None:
    kept: dict[str, Any] = {}
    for folder in ("v41", "v41-sparse"):
        with np.load(source / folder / "goldens.npz") as found:
            for case in sorted({key.split(".")[0] for key in found}):
                kept |= cut_case(f"{folder}.{case}", case, found)
        config = (source / folder / "config.json").read_text()
        (DATA.parent / "configs" / f"{folder}.json").write_text(config)
    config = (source / "v41-packed" / "config.json").read_text()
    (DATA.parent / "configs" / "v41-packed.json").write_text(config)
    np.savez_compressed(DATA / "goldens.npz", **kept)


def cut_case(full: str, case: str, found: Any) -> dict[str, Any]:
    """Ids, patches (exact in bf16), 16 logits of every row and every row's best token."""
    out: dict[str, Any] = {f"{full}.ids": found[f"{case}.ids"].astype(np.int16)}
    out[f"{full}.logits"] = found[f"{case}.logits"][:, COLUMNS]
    best = np.sort(found[f"{case}.logits"], axis=-1)
    out[f"{full}.argmax"] = found[f"{case}.logits"].argmax(-1).astype(np.int16)
    out[f"{full}.lead"] = (best[:, -1] - best[:, -2]).astype(np.float32)
    for j in range(int(found[f"{case}.num_images"])):
        patches = torch.from_numpy(found[f"{case}.{j}.patches"]).to(torch.bfloat16)
        out[f"{full}.{j}.patches"] = patches.view(torch.int16).numpy()
        out[f"{full}.{j}.grid"] = found[f"{case}.{j}.vit_grid"].astype(np.int16)
        out[f"{full}.{j}.start"] = found[f"{case}.{j}.start"].astype(np.int16)
        out[f"{full}.{j}.length"] = np.int16(len(found[f"{case}.{j}.types"]))
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
