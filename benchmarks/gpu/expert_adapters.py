"""Routed experts of V4 with adapters: right, and the cost. `PYTHONPATH=. python3 benchmarks/gpu/expert_adapters.py`.

Rank 16 on w1, w2 and w3 of all 256 experts in bf16; one adapter on all rows, eight of them in turn, or none. Compared
with the reference on poisoned memory, then timed as replays of a CUDA graph over sets of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from spyglass.bench.tune import GraphTimer, difference
from spyglass.ops.experts_grouped import reference
from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.ops.experts_grouped.triton import experts_grouped
from spyglass.quant.formats import FP4, FakeQuant
from spyglass.quant.packed import Packed, empty_packed
from spyglass.quant.tiles import untile

HIDDEN, WIDTH, EXPERTS, CHOSEN, RANK = 4096, 2048, 256, 6, 16
SHAPES = {"w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
ROUNDING = FakeQuant(element="e4m3", block=128)
DEV = "cuda"


def adapters(count: int) -> ExpertAdapters:
    matrices = {}
    for name, (outer, inner) in SHAPES.items():
        rows = count * EXPERTS * RANK
        start = torch.arange(count)[:, None] * EXPERTS * RANK + torch.arange(EXPERTS + 1)[None] * RANK
        matrices[name] = ExpertRanks(
            (torch.randn(rows, inner, device=DEV) * inner**-0.5).bfloat16(),
            (torch.randn(rows, outer, device=DEV) * 0.1).bfloat16(),
            torch.rand(rows, device=DEV),
            start.int().to(DEV),
            ((RANK,) * EXPERTS,) * count,
        )
    return ExpertAdapters(torch.arange(1, count + 1, dtype=torch.int32, device=DEV), matrices)


def stacks() -> list[Packed]:
    found = []
    for shape in SHAPES.values():
        weight = replace(empty_packed(FP4, (EXPERTS, *shape), DEV), tiled=True)
        weight.data.random_(0, 256)
        assert weight.scale is not None
        weight.scale.random_(117, 121)
        found.append(weight)
    return found


def choices(rows: int) -> Iterator[torch.Tensor]:
    for _ in range({1: 24, 8: 8, 64: 3, 128: 3}.get(rows, 2)):
        yield torch.rand(rows, EXPERTS).topk(CHOSEN, 1).indices.int().to(DEV)


def main() -> None:
    torch.manual_seed(0)
    weights, held, timer = stacks(), {1: adapters(1), 8: adapters(8)}, GraphTimer()
    plain = [untile(weight) for weight in weights]
    print(
        f"{'rows':>5} {'none':>9} {'one adapter':>18} {'eight':>18}   us, share of none; differences from the reference"
    )
    for rows in (1, 8, 64, 128, 1024, 4096):
        x, routing = torch.randn(rows, HIDDEN, device=DEV).bfloat16(), torch.rand(rows, CHOSEN, device=DEV)
        sets, times, errors = list(choices(rows)), [], []
        for count in (0, 1, 8):
            adapter_ids = torch.arange(rows, device=DEV, dtype=torch.int32) % count + 1 if count else None
            if adapter_ids is not None and count == 8:
                adapter_ids[::5] = 0
            options = {"limit": 10.0, "rounding": ROUNDING, "adapter_T": adapter_ids, "adapters": held.get(count)}
            torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written with NaN
            found = experts_grouped(x, sets[0], routing, *weights, **options)
            torch.use_deterministic_algorithms(False)
            if rows <= 128:
                errors.append(difference(found, reference.experts_grouped(x, sets[0], routing, *plain, **options)))
            assert bool(torch.isfinite(found).all())
            times.append(timer([partial(experts_grouped, x, ids, routing, *weights, **options) for ids in sets]))
        shares = " ".join(f"{us:10.1f} ({times[0] / us:4.0%})" for us in times[1:])
        print(f"{rows:5} {times[0]:9.1f} {shares}   " + " ".join(f"{error:.1e}" for error in errors), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
