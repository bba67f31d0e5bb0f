"""One golden prompt as tokens: ids in the released convention, pictures as patches or as finished image rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spyglass.batch.images import pack_images
from spyglass.model import VisionLanguageModel
from tests.driver import Tokens, picture_tokens, text_tokens

COLUMNS = slice(7, None, 32)  # 16 of 512 logits of every row


def tokens_of(found: Mapping[str, Any], case: str, model: VisionLanguageModel) -> Tokens:
    """Case `case` of a golden file; pictures go through the model's own tower where patches are given."""
    ids = found[f"{case}.ids"].astype(np.int64)
    pictures = sum(key.startswith(f"{case}.") and key.endswith(".perm") for key in found)
    if not pictures:
        return text_tokens(ids)
    orders = [found[f"{case}.{j}.perm"].astype(np.int64) for j in range(pictures)]
    rows = torch.from_numpy(found[f"{case}.rows"]) if f"{case}.rows" in found else None
    if rows is None:
        rows = _encode(found, case, orders, model)
    return picture_tokens(ids, model.config.text.vocab_size, orders, rows)


def _encode(found: Mapping[str, Any], case: str, orders: list[Any], model: VisionLanguageModel) -> torch.Tensor:
    assert model.config.vision is not None
    patches, grids = [], []
    for j in range(len(orders)):
        stored = torch.from_numpy(found[f"{case}.{j}.patches"])
        patches.append(stored.view(torch.bfloat16).float() if stored.dtype == torch.int16 else stored)
        grids.append((int(found[f"{case}.{j}.vit_grid"][0]), int(found[f"{case}.{j}.vit_grid"][1])))
    images = pack_images(patches, grids, model.config.vision, device=model.options.build.device)
    with torch.inference_mode():
        return model.encode_images(images).cpu()
