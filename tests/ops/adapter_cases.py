"""Cases of what adapters add, and of the engram gate."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from tests.ops.call import Call, Source


def expert_adapters(
    source: Source, sizes: tuple[int, int, int, int], dtype: torch.dtype, ranks: tuple[int, int] = (3, 5)
) -> dict[str, Any]:
    """Adapters 2 and 5, the second without w3 and with other ranks; some rows have none, or another."""
    experts, width, hidden, _ = sizes
    shapes = {"w1": (hidden, width), "w3": (hidden, width), "w2": (width, hidden)}
    matrices = {}
    for matrix, (inner, outer) in shapes.items():
        second = 0 if matrix == "w3" else ranks[1]
        ranks_AE = tuple([ranks[0]] * experts), tuple([second if e % 2 else 0 for e in range(experts)])
        last = np.cumsum([0, *ranks_AE[0], *ranks_AE[1]])
        rows = int(last[-1])
        matrices[matrix] = ExpertRanks(
            source.normal(rows, inner, dtype=dtype, scale=inner**-0.5),
            source.normal(rows, outer, dtype=dtype),
            source.uniform(rows),
            torch.from_numpy(np.stack([last[: experts + 1], last[experts:]]).astype(np.int32)),
            ranks_AE,
        )
    adapter_ids = torch.tensor([2, 0, 5, 4], dtype=torch.int32)
    return {
        "adapter_T": adapter_ids[source.below(4, source.rows).long()],
        "adapters": ExpertAdapters(torch.tensor([2, 5], dtype=torch.int32), matrices),
    }


def engram_gate(source: Source, *, images: bool = False) -> Call:
    streams, hidden = 3, 72
    options: dict[str, Any] = {"eps": 1e-6}
    if images:
        options["is_image_T"] = torch.arange(source.rows) % 3 == 0
    args = (
        source.normal(source.rows, streams, hidden),
        source.normal(source.rows, (streams + 1) * hidden),
        source.fp32(streams, hidden),
        source.fp32(streams, hidden),
    )
    return Call(args=args, options=options)


def lora_delta(source: Source, groups: int) -> Call:
    """Adapters 2 and 5 of ranks 3 and 4; some rows have none, some an adapter that owns nothing here."""
    adapter_ids = torch.tensor([5, 2, 0, 4], dtype=torch.int32)[source.below(4, source.rows).long()]
    owner = torch.tensor([2] * 3 + [5] * 4, dtype=torch.int32)
    a, b = source.fp32(7, 64), source.fp32(7, groups, 40)
    args = (source.normal(source.rows, groups, 64, scale=0.1), adapter_ids, a, b, owner, source.uniform(7))
    return Call(args=args, options={})
