"""A program per row and group of heads; few rows share their keys among several programs, and a second launch adds up.

What varies on the device (window, visible entries, top-k indices) is read there, so a graph can hold both launches; the
grid follows from the number of rows and the two widths. Pools never wrap around: visible <= table width x page rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops import stored, tuned
from spyglass.ops.gpu import GENERATIONS, generation, here, learns, processors, usable
from spyglass.ops.sparse_attention import reference
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.formats import StoredRow

__all__ = ["Launch", "attend", "choose", "launch_for", "sparse_attention", "suits", "usable"]

_LOG2_E = 1.4426950408889634
_SPLITS = (32, 20, 16, 10, 8, 6, 4, 2, 1)  # few, as each is a kernel of its own
_STREAM_ROWS = 16  # below, shares of a tile each fill the device as well and start sooner
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a call is cut: heads and keys of a tile, programs that share one row's keys, and Triton's two knobs.

    `stream`: by the kernel of `triton_hopper_kernel.py`, 64 heads of 512 channels in bf16 and tiles of 64 keys.
    """

    heads: int
    keys: int
    splits: int
    warps: int
    stages: int
    stream: bool = False


def sparse_attention(
    q_THD: torch.Tensor,
    window_NBD: torch.Tensor,
    window_table_SP: torch.Tensor,
    seq_T: torch.Tensor,
    lo_T: torch.Tensor,
    hi_T: torch.Tensor,
    sink_H: torch.Tensor,
    *,
    scale: float,
    window_width: int,
    pool_NBD: torch.Tensor | None = None,
    pool_table_SP: torch.Tensor | None = None,
    visible_T: torch.Tensor | None = None,
    topk_indices_TX: torch.Tensor | None = None,
    pool_width: int = 0,
    turn: Turn | None = None,
    window_format: StoredRow | None = None,
    pool_format: StoredRow | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """See `reference.py`, which also serves gradients and rows of other sizes than powers of two.

    Raises:
        DeviceError: pages of bytes, and no format of such rows.
    """
    formats = window_format, pool_format
    if learns(q_THD, window_NBD) or not suits(q_THD, window_NBD, pool_NBD, formats):
        return reference.sparse_attention(
            q_THD,
            window_NBD,
            window_table_SP,
            seq_T,
            lo_T,
            hi_T,
            sink_H,
            scale=scale,
            window_width=window_width,
            pool_NBD=pool_NBD,
            pool_table_SP=pool_table_SP,
            visible_T=visible_T,
            topk_indices_TX=topk_indices_TX,
            pool_width=pool_width,
            turn=turn,
            window_format=window_format,
            pool_format=pool_format,
        )
    pool = None
    if pool_NBD is not None and pool_width > 0:
        assert pool_table_SP is not None and visible_T is not None
        pool = (pool_NBD, pool_table_SP, visible_T, topk_indices_TX)
    window = (window_NBD, window_table_SP, seq_T, lo_T, hi_T)
    launch = launch or choose(q_THD, window_width, pool_width)
    return attend(q_THD, window, pool, sink_H, scale, launch, turn, (window_width, pool_width), formats)


def suits(
    q_THD: torch.Tensor,
    window_NBD: torch.Tensor,
    pool_NBD: torch.Tensor | None,
    formats: tuple[StoredRow | None, StoredRow | None] = (None, None),
) -> bool:
    """Whether the kernel takes these rows."""
    dim, rows = q_THD.shape[-1], [window_NBD] if pool_NBD is None else [window_NBD, pool_NBD]
    return (
        q_THD.dtype in _DTYPES
        and dim >= 16
        and dim & (dim - 1) == 0
        and q_THD.numel() > 0
        and all(stored.suits(x, format, q_THD.dtype) for x, format in zip(rows, formats, strict=False))
    )


def choose(q_THD: torch.Tensor, window_width: int, pool_width: int) -> Launch:
    """The launch for rows of this kind; `spyglass/ops/sparse_attention/triton.py` is the only place that knows."""
    keys = window_width + pool_width
    found = tuned.find("sparse_attention", (Launch,), len(q_THD), **shape_key(q_THD, keys))
    if found is not None:
        return found
    heads, dim = q_THD.shape[1:]
    width = dim * q_THD.element_size()
    streams = generation() == 90 and q_THD.dtype == torch.bfloat16 and (heads, dim) == (64, 512)
    return launch_for(generation(), processors(q_THD.device), len(q_THD), heads, width, keys, streams)


def shape_key(q_THD: torch.Tensor, keys: int) -> dict[str, object]:
    """What a table knows attention by."""
    return {
        "dtype": str(q_THD.dtype).removeprefix("torch."),
        "heads": q_THD.shape[1],
        "dim": q_THD.shape[2],
        "keys": keys,
    }


def launch_for(
    arch: int, num_processors: int, rows: int, heads: int, row_bytes: int, keys: int, streams: bool
) -> Launch:
    """By generation (shared memory of a program: 227 KB on 9.0 and 10.0, 163 on 8.0, 99 on the others), rows of the
    step, and the most keys a row may see. Programs that share a row fill the device, with a tile each at least."""
    tile = GENERATIONS[arch].attention if arch in GENERATIONS else (16, 32, 4)
    if row_bytes > 1024:  # fp32: exact products on the plain cores
        heads_at_once, keys_at_once, warps, stages = 16, 16, 4, 1
    elif streams and rows >= _STREAM_ROWS:
        heads_at_once, keys_at_once, warps, stages = 64, 64, 8, 2
    elif rows > 2 and 2 * rows * -(-keys // tile[1]) >= num_processors:
        (heads_at_once, keys_at_once, warps), stages = tile, 1
    else:  # small tiles, two programs a processor
        heads_at_once, keys_at_once, warps, stages = 16, 32, 4, 1
        num_processors *= 2
    stream = streams and rows >= _STREAM_ROWS
    heads_at_once = min(heads_at_once, max(16, 1 << (heads - 1).bit_length()))
    groups, tiles = -(-heads // heads_at_once), max(1, -(-keys // keys_at_once))
    most = max(1, min(num_processors // max(1, rows * groups), tiles))
    splits = next(splits for splits in _SPLITS if splits <= most)
    return Launch(heads=heads_at_once, keys=keys_at_once, splits=splits, warps=warps, stages=stages, stream=stream)


def attend(
    q_THD: torch.Tensor,
    window: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    pool: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    sink_H: torch.Tensor,
    scale: float,
    launch: Launch,
    turn: Turn | None,
    widths: tuple[int, int],
    formats: tuple[StoredRow | None, StoredRow | None] = (None, None),
) -> torch.Tensor:
    """`sparse_attention` so launched. `window` = pages, table, seq, lo, hi; `pool` = pages, table, visible, indices;
    `widths` bound the keys of either, `formats` say what their bytes are."""
    from spyglass.ops.sparse_attention.triton_kernel import attend_share, combine_shares

    if launch.stream:
        from spyglass.ops.sparse_attention.triton_hopper_kernel import attend_stream

    (rows, heads, dim), (window_width, pool_width) = q_THD.shape, widths
    window_NBD, table_SP, seq_T, lo_T, hi_T = window
    pool_NBD, pool_table_SP, visible_T, topk_indices_TX = (window_NBD, table_SP, lo_T, None) if pool is None else pool
    window_row = stored.row_code("sparse_attention", window_NBD, formats[0])
    pool_row = window_row if pool is None else stored.row_code("sparse_attention", pool_NBD, formats[1])
    q_THD, out_THD = q_THD.contiguous(), torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    splits, split = launch.splits, launch.splits > 1
    shares, part = out_THD, sink_H
    if split:
        shares = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=q_THD.device)
        part = torch.empty(rows, splits, heads, 2, dtype=torch.float32, device=q_THD.device)
    cos, sin = (sink_H, sink_H) if turn is None else (turn.cos_TR.contiguous(), turn.sin_TR.contiguous())
    turned = 0 if turn is None else 2 * turn.cos_TR.shape[-1]
    eps = None if turn is None else turn.eps
    norm = 0 if turn is None or eps is None else 2 if turn.stepwise else 1
    pdl = split and q_THD.device.type != "cpu" and here().early  # the interpreter has none
    inputs = (
        *(q_THD, window_NBD, table_SP, seq_T, lo_T, hi_T, sink_H, pool_NBD, pool_table_SP, visible_T),
        *(lo_T if topk_indices_TX is None else topk_indices_TX, cos, sin, shares, part, scale * _LOG2_E),
        *(
            table_SP.shape[1],
            pool_table_SP.shape[1],
            0 if topk_indices_TX is None else topk_indices_TX.shape[1],
            splits,
        ),
    )
    meaning = {
        "NUM_HEADS": heads,
        "DIM": dim,
        "TURNED": turned,
        "NORM": norm,
        "EPS": eps or 0.0,
        "WINDOW_PAGE": window_NBD.shape[1],
        "POOL_PAGE": 0 if pool is None else pool_NBD.shape[1],
        "TOPK": topk_indices_TX is not None,
        "WINDOW_ROW": window_row,
        "POOL_ROW": pool_row,
        "KEYS": launch.keys,
        "SPLIT": split,
    }
    if launch.stream:
        work = rows * splits
        programs = min(work, processors(q_THD.device))
        attend_stream[(programs,)](*inputs, work, **meaning, REGISTERS=168, num_warps=8, maxnreg=168)
    else:
        attend_share[(rows * -(-heads // launch.heads) * splits,)](
            *inputs,
            -(-window_width // launch.keys),
            **meaning,
            ONE=split and splits >= -(-window_width // launch.keys) - (-pool_width // launch.keys),
            HEADS=launch.heads,
            STAGES=launch.stages,
            PDL=pdl,
            num_warps=launch.warps,
            num_stages=launch.stages,
        )
    if split:
        combine_shares[(rows * heads,)](
            shares,
            part,
            sink_H,
            cos,
            sin,
            out_THD,
            NUM_HEADS=heads,
            DIM=dim,
            TURNED=turned,
            SPLITS=splits,
            PADDED=1 << (splits - 1).bit_length(),
            PDL=pdl and not launch.stream,
            num_warps=4,
            **({"launch_pdl": True} if pdl and not launch.stream else {}),
        )
    return out_THD
