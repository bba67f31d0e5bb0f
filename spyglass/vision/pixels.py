"""From pixels to what the tower reads: v = ((u / 255) - 0.5) / 0.5 in float32, then bf16, by a table (spec v4 9.2)."""

from __future__ import annotations

import torch


def pixel_table() -> torch.Tensor:
    """float32 [256]: the normalised value of each uint8 sample, rounded to bf16 as the reference does (spec v4 9.2)."""
    pixel = torch.arange(256, dtype=torch.float32)
    return ((pixel / 255 - 0.5) / 0.5).to(torch.bfloat16).float()


def normalised(patches_U: torch.Tensor, dtype: torch.dtype, table: torch.Tensor | None = None) -> torch.Tensor:
    """Patches as the tower reads them, in `dtype`; floats only change their dtype.

    uint8 goes through the table (`pixel_table`, already on the device when given), so that a device's own division,
    which may differ in the last bit, is never asked.
    """
    if patches_U.dtype != torch.uint8:
        return patches_U.to(dtype)
    table = (pixel_table() if table is None else table).to(device=patches_U.device, dtype=dtype)
    return table.index_select(0, patches_U.flatten().int()).view(patches_U.shape)
