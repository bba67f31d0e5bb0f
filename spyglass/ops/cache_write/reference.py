"""Rows into their places of the paged memory."""

from __future__ import annotations

import torch


def cache_write(pages_NBD: torch.Tensor, rows_TD: torch.Tensor, write_T: torch.Tensor) -> None:
    """pages.flat[write_T[t]] = rows_TD[t], in place, where write_T[t] >= 0 (int64); rows take the pages' dtype."""
    kept = write_T >= 0
    pages_NBD.flatten(0, 1).index_copy_(0, write_T[kept], rows_TD[kept].to(pages_NBD.dtype))
