"""Cuts the backbone's test vectors out of the full golden sets; kept to show where each number came from.

    python -m scripts.golden.backbone FOLDER

FOLDER holds `v4-text`, `v4-vision`, `v4-sparse` (goldens.npz, bf16 weights) and the two packed checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from spyglass.model import VisionLanguageModel, load_model
from tests.golden_case import COLUMNS, tokens_of

DATA = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "v4"
AS_PATCHES = ("v4-vision.pic0", "v4-vision.pic2")  # the other pictures are kept as rows of the aligner
SHARD = "model-00001-of-00001.safetensors"


def main(source: Path) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    with safe_open(source / "v4-vision-packed" / SHARD, "pt") as tensors:
        table = tensors.get_tensor("layers.0.ffn.gate.tid2eid")
    np.save(DATA / "tid2eid.npy", table.numpy().astype(np.int8))
    rounded_vectors(source)
    model = load_model(source / "v4-vision", dtype="float32", ops="reference", expand=True, progress=False).model
    kept: dict[str, Any] = {}
    for name in ("v4-vision", "v4-sparse"):
        with np.load(source / name / "goldens.npz") as found:
            for case in sorted({key.split(".")[0] for key in found}):
                kept |= cut_case(f"{name}.{case}", case, found, model)
    np.savez_compressed(DATA / "goldens.npz", **kept)
    digests = {"v4-vision": digest(source / "v4-vision" / SHARD)}
    (DATA / "decoded.json").write_text(json.dumps(digests) + "\n")


def cut_case(full: str, case: str, found: Any, model: VisionLanguageModel) -> dict[str, Any]:
    """Ids, picture data, 16 logits of every row and every row's best token."""
    out: dict[str, Any] = {f"{full}.ids": found[f"{case}.ids"].astype(np.int16)}
    out[f"{full}.logits"] = found[f"{case}.logits"][:, COLUMNS]
    out[f"{full}.argmax"] = found[f"{case}.logits"].argmax(-1).astype(np.int16)
    count = int(found[f"{case}.num_images"])
    for j in range(count):
        for key in ("vit_grid", "perm"):
            out[f"{full}.{j}.{key}"] = found[f"{case}.{j}.{key}"].astype(np.int16)
        if full in AS_PATCHES:
            patches = torch.from_numpy(found[f"{case}.{j}.patches"]).to(torch.bfloat16)
            out[f"{full}.{j}.patches"] = patches.view(torch.int16).numpy()
    if count and full not in AS_PATCHES:
        rows = tokens_of({key: found[key] for key in found}, case, model).image_rows
        assert rows is not None
        out[f"{full}.rows"] = rows.numpy()
    return out


def rounded_vectors(source: Path) -> None:
    """Short prompts of `v4-text-packed` in rounded and in plain arithmetic."""
    with np.load(source / "v4-text-packed" / "rounded.npz") as found:
        rounded = {key: found[key] for key in found}
    with np.load(source / "v4-text" / "goldens.npz") as found:
        plain = {f"plain.{key}": found[key] for key in found if key.split(".")[0] in ("text1", "text5")}
    np.savez_compressed(DATA / "rounded.npz", **rounded, **plain)


def digest(file: Path) -> str:
    """SHA-256 over the bytes of all bf16 tensors, in the order of their names."""
    result = hashlib.sha256()
    with safe_open(file, "pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            if tensor.dtype == torch.bfloat16:
                result.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
