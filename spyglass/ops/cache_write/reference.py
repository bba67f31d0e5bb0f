"""Rows into their places of the paged memory."""

from __future__ import annotations

import torch


def cache_write(pages_NBD: torch.Tensor, rows_TD: torch.Tensor, write_T: torch.Tensor) -> None:
    """pages.flat[write_T[t]] = rows_TD[t], in place, where write_T[t] >= 0 (int64); rows take the pages' dtype."""
    if not len(write_T):
        return
    rows_ND, written_T = pages_NBD.flatten(0, 1), write_T >= 0
    # nothing is read on the host: a row that is not written repeats the first that is, or what is there if none is
    source_T = torch.where(written_T, torch.arange(len(write_T), device=write_T.device), written_T.int().argmax())
    target_T = write_T.index_select(0, source_T).clamp(min=0)
    repeated_TD = torch.where(written_T.any(), rows_TD.index_select(0, source_T), rows_ND.index_select(0, target_T))
    new_TD = torch.where(written_T[:, None], rows_TD, repeated_TD.detach()).to(pages_NBD.dtype)
    rows_ND.index_copy_(0, target_T, new_TD)
