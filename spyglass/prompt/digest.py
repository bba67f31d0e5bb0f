"""An image's identity for caches: its pixels as the model sees them, and its plan; never a name or part of a file."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spyglass.prompt.tokens import ImagePlan


def prompt_digest(pixels: NDArray[Any], plan: ImagePlan) -> bytes:
    """SHA-256 over dtype, shape, plan and every byte of `pixels` [N, 3, p, p]; 32 bytes.

    The prompt position of the image is left out: the same image elsewhere has other leading pads but the same rows.
    """
    facts = (
        *pixels.shape,
        *plan.resized,
        *plan.vit_grid,
        *plan.llm_grid,
        plan.num_tokens,
        plan.stretch,
        plan.patch_size,
    )
    digest = hashlib.sha256(f"{pixels.dtype.str} {pixels.ndim} ".encode())
    digest.update(struct.pack(f"<{len(facts)}q", *facts))
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
