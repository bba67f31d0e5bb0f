"""Builders of `cases.py` for ops that read rows of the cache: attention and the index choice, plain rows and codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spyglass.ops.sparse_attention.reference import Turn
from spyglass.quant.formats import FakeQuant, StoredRow
from tests.ops.call import Call, Source
from tests.ops.paged import Paged, as_codes

NEAR = StoredRow(quant=FakeQuant(element="e4m3", block=8), dim=32, dims=16)
FAR = StoredRow(quant=FakeQuant(element="e2m1", block=16, scale="e4m3"), dim=32, dims=32)
KEYS = StoredRow(quant=FakeQuant(element="e2m1", block=8), dim=16, dims=16)


@dataclass(frozen=True, kw_only=True)
class Queries:
    """Rows of three sequences of which 5, 0 and 23 tokens came before: where each is, int32 [rows] on the host."""

    seq: torch.Tensor
    position: torch.Tensor
    lengths: list[int]

    @classmethod
    def of(cls, rows: int) -> Queries:
        past, new = (5, 0, 23), [rows - 2 * (rows // 3), rows // 3, rows // 3]
        position = torch.cat([torch.arange(p, p + n) for p, n in zip(past, new, strict=True)])
        seq = torch.repeat_interleave(torch.arange(3), torch.tensor(new))
        lengths = [p + n for p, n in zip(past, new, strict=True)]
        return cls(seq=seq.int(), position=position.int(), lengths=lengths)


def sparse_attention(
    source: Source,
    *,
    pool: bool = False,
    topk: str = "",
    heads: int = 3,
    dim: int = 32,
    window: int = 7,
    slack: int = 0,
    turned: bool = False,
    formats: tuple[StoredRow | None, StoredRow | None] = (None, None),
) -> Call:
    """A window of `window` rows, of which all before are gone; compressed rows of three tokens each; one image.

    `formats`: of pages of codes, near and far. `slack` is added to the bounds of both counts: they are capacities,
    not lengths.
    """
    queries = Queries.of(source.rows)
    low, high = (queries.position - window + 1).clamp(min=0), queries.position.clone()
    if source.rows >= 12:
        high[2:6] = high[5].clone()  # an image sees to its end
    visible = (queries.position + 1) // 3
    if source.padding:
        low[-1], high[-1], visible[-1] = 0, -1, 0
    first = [int(low[queries.seq == s].min()) if (queries.seq == s).any() else 0 for s in range(3)]
    near = Paged([source.normal(n, dim) for n in queries.lengths], 6, first)
    options: dict[str, Any] = {"scale": dim**-0.5, "window_width": int((high - low).max()) + 1 + slack}
    if pool:
        far = Paged([source.normal(max(n // 3, 1), dim) for n in queries.lengths], 4)
        bound = max(int(visible.max()), 1)
        options |= {
            "pool_NBD": as_codes(far.pages, formats[1]),
            "pool_format": formats[1],
            "pool_table_SP": far.table,
            "visible_T": visible.int(),
        }
        options["pool_width"] = bound + slack
        if topk:
            chosen = source.choices(bound + 2, min(bound + 2, 5)).sort(dim=1).values
            chosen[::4, -1] = -1
            prefix = torch.arange(chosen.shape[1], dtype=torch.int32).expand_as(chosen)
            prefix = torch.where(prefix < visible[:, None], prefix, -1)
            options["topk_indices_TX"] = {"chosen": chosen, "first": prefix}[topk].contiguous()
            options["pool_width"] = chosen.shape[1]
    q, sink = source.normal(source.rows, heads, dim), source.fp32(heads)
    if turned:
        angle = source.fp32(source.rows, dim // 8)
        options["turn"] = Turn(cos_TR=angle.cos(), sin_TR=angle.sin(), eps=1e-6, stepwise=pool)
    options["window_format"] = formats[0]
    args = (q, as_codes(near.pages, formats[0]), near.table, queries.seq, low.int(), high.int(), sink)
    return Call(args=args, options=options, padding=source.padding)


def index_topk(
    source: Source,
    *,
    blocks: bool = False,
    stepwise: bool = False,
    slack: int = 0,
    k: int = 5,
    format: StoredRow | None = None,
) -> Call:
    args, most = _index_inputs(source, stepwise, format)
    options: dict[str, Any] = {"k": k, "max_visible": most + slack, "stepwise": stepwise, "weight_scale": 0.5}
    options["key_format"] = format
    if blocks:
        num_blocks = -(-options["max_visible"] // 3)
        listed = source.choices(num_blocks + 2, 2).sort(dim=1).values
        options |= {"blocks_TY": torch.where(listed < num_blocks, listed, -1), "block_size": 3}
    return Call(args=args, options=options, exact=True, padding=source.padding)


def index_blocks(
    source: Source,
    *,
    stepwise: bool = False,
    slack: int = 0,
    block_size: int = 3,
    format: StoredRow | None = None,
) -> Call:
    args, most = _index_inputs(source, stepwise, format)
    options: dict[str, Any] = {
        "num_blocks": 2,
        "block_size": block_size,
        "max_visible": most + slack,
        "stepwise": stepwise,
    }
    options["key_format"] = format
    return Call(args=args, options=options, exact=True, padding=source.padding)


def _index_inputs(source: Source, stepwise: bool, format: StoredRow | None) -> tuple[tuple[torch.Tensor, ...], int]:
    """Small integers where every step is rounded: then no order of a sum can turn a choice."""
    queries = Queries.of(source.rows)
    visible = (queries.position + 1) // 2
    if source.padding:
        visible[-1] = 0

    def values(*shape: int) -> torch.Tensor:
        return (source.below(3, *shape) - 1).to(source.dtype) if stepwise else source.normal(*shape)

    keys = Paged([values(max(n // 2, 1), 16) for n in queries.lengths], 3)
    q, weights = values(source.rows, 4, 16), values(source.rows, 4)
    return (q, weights, as_codes(keys.pages, format), keys.table, queries.seq, visible.int()), max(
        int(visible.max()), 1
    )
