"""One step of the model, as data: what the packed rows are (`Batch`) and where their memory lies (`CacheView`).

T packed rows of S sequences. Everything a layer needs that depends only on positions (which keys a query sees, where
a row is written, which rows a pooled entry reads) is computed once per step, on the host, and shared by all layers.
A padding row has position -1, sees no key and is written nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """Images of one call of the tower, packed.

    `patches_U` uint8 pixels [U, 3, p, p] or normalised floats; `grids_I2` (rows, columns) per image, on the host;
    `cu_seqlens_I1` int32 [I + 1] offsets into U; `adapter_I` adapter per image (0 = none). `between_layers` is called
    before each layer, as that of a `Batch`.
    """

    patches_U: torch.Tensor
    grids_I2: tuple[tuple[int, int], ...]
    cu_seqlens_I1: torch.Tensor
    adapter_I: torch.Tensor
    between_layers: Callable[[], object] | None = None

    def to(self, device: torch.device | str) -> ImageBatch:
        moved = {name: getattr(self, name).to(device) for name in ("patches_U", "cu_seqlens_I1", "adapter_I")}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of one step. Device tensors unless said otherwise.

    `visible` keys of row t in the window are positions `window_lo_T[t] .. window_hi_T[t]` of its own sequence (both
    inclusive, lo > hi = none); `window_width` (host) is the longest such range.
    """

    ids_T: torch.Tensor  # int32; -1 at image positions and padding rows
    kinds_T: torch.Tensor  # int8, TokenKind; -1 = text
    positions_T: torch.Tensor  # int32, -1 = padding row
    seq_T: torch.Tensor  # int32, row of every table_SP
    window_lo_T: torch.Tensor  # int32
    window_hi_T: torch.Tensor  # int32
    window_width: int
    image_index_T: torch.Tensor | None  # int32 row of image_rows, -1 = none; None = no IMAGE row in this step
    has_images: bool  # whether a kind may be >= 0 in this step
    logit_rows_R: torch.Tensor  # int64 rows whose logits are wanted
    adapter_T: torch.Tensor | None = None  # int32 adapter per row, None = no adapters
    engram_rows: Mapping[int, torch.Tensor] = field(default_factory=dict)  # layer -> gathered rows
    capture: tuple[int, ...] = ()  # layers whose streams are wanted in aux
    between_layers: Callable[[], object] | None = None  # called before each layer: others' steps may run there


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionStep:
    """What compression does in this step for one ratio; shared by all layers of that ratio.

    `sources_PB` int32: the un-pooled rows of each new entry, oldest first: v >= 0 = row v of this step, -1 = absent,
    v <= -2 = row -(v + 2) of the flattened state pages. B = CompressorPlan.group_rows.
    """

    ratio: int
    sources_PB: torch.Tensor
    positions_P: torch.Tensor  # int32, rope position of each new entry (first token of its group)
    write_P: torch.Tensor  # int64 flat row in the pool group, -1 = padding
    phase_T: torch.Tensor  # int64, position mod ratio
    state_write_T: torch.Tensor | None  # int64 flat row in the state group, -1 = not kept; None = no state
    visible_T: torch.Tensor  # int32, entries each query may see: (position + 1) // ratio
    max_visible: int  # host: bound of `visible_T`


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """Memory as the model sees it.

    Row `n` of sequence s in a group lies in page `table_SP[s, (n // page_rows) % P]` at offset `n % page_rows`; `n`
    counts rows (tokens for window and state, entries for pools). `pages[kind, layer]` is [num_pages, page_rows,
    row_dim], or uint8 [num_pages, page_rows, bytes] where rows are stored as codes (`quant.formats.StoredRow`).
    """

    pages: Mapping[tuple[str, int], torch.Tensor]
    table_SP: Mapping[str, torch.Tensor]  # int32 by group
    window_write_T: torch.Tensor  # int64 flat row in the window group, -1 = padding
    compression: Mapping[int, CompressionStep]  # by ratio
