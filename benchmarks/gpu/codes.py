"""Memory of codes beside plain rows on one GPU, in one run. `PYTHONPATH=. python benchmarks/gpu/codes.py [PARTS]`.

Parts: `kernels` (attention, index scores and the write of rows, checked to have the bits that plain rows give, then
timed as replays of a graph whose launches read other pages each time), `model` (steps of `flash-4layer` with both).
Kernels compile in other processes first; the streaming kernel comes last, since a fault there may hang.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.attention import BF, DEV, PAGE, SCALE, W, X, ints, launch_of, timed, turn
from spyglass.bench.gpu import decode_seconds, prefill_seconds
from spyglass.config import cache
from spyglass.engine.llm import LLM
from spyglass.ops.index_topk import triton as index
from spyglass.ops.launches import compile_kernels, recorded
from spyglass.ops.row_finish.triton import row_finish
from spyglass.ops.sparse_attention import triton as attention
from spyglass.quant.formats import FakeQuant, StoredRow
from spyglass.quant.rows import decode_rows, encode_rows

START = time.time()
V4 = StoredRow(quant=FakeQuant(element="e4m3", block=64), dim=512, dims=448)
V41 = StoredRow(quant=FakeQuant(element="e4m3", block=32), dim=512, dims=512)
V41_POOL = StoredRow(quant=FakeQuant(element="e2m1", block=16, scale="e4m3"), dim=512, dims=512)
KEYS = StoredRow(quant=FakeQuant(element="e2m1", block=32), dim=128, dims=128)
FAMILIES: dict[str, tuple[StoredRow, StoredRow]] = {"v4": (V4, V4), "v4.1": (V41, V41_POOL)}
PAGES, SETS = 2048, {1: 40, 8: 12, 32: 6, 128: 3, 4096: 2}
STREAM = 12  # warps that mark the streaming kernel in `launch_of`
LAUNCHES = {
    1: [(16, 32, 20, 4, 1), (16, 64, 10, 8, 1), (16, 32, 20, 8, 1)],
    8: [(16, 32, 10, 4, 1), (64, 64, 10, 8, 1), (16, 64, 10, 8, 1), (32, 64, 10, 8, 1)],
    32: [(64, 64, 4, 8, 1), (64, 64, 10, 8, 1), (64, 64, 4, STREAM, 2)],
    128: [(64, 64, 1, 8, 1), (64, 64, 1, STREAM, 2)],
    4096: [(64, 64, 1, 8, 1), (64, 64, 1, STREAM, 2)],
}


def memory(format: StoredRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of random rows: as codes, and as the bf16 numbers that those are."""
    rows = torch.randn(PAGES, PAGE, format.dim, device=DEV).to(BF)
    codes = torch.cat([encode_rows(part, format) for part in rows.split(256)])
    return codes, torch.cat([decode_rows(part, format, BF) for part in codes.split(256)])


def attended(rows: int) -> dict[str, Any]:
    """Rows at the end of sequences of their own (4,096: one prompt), their tables and indices."""
    one, entries = rows > 1024, 1024
    seqs, width = (1, rows // PAGE) if one else (rows, 3)
    position = torch.arange(rows) if one else torch.randint(W, 60000, (rows,))
    indices = torch.rand(rows, entries, device=DEV).argsort(1)[:, :X].sort(1).values
    return {
        "q": (1.5 * torch.randn(rows, 64, 512, device=DEV)).to(BF),
        "lists": (
            ints(torch.randint(0, PAGES, (seqs, width))),
            ints([0] * rows if one else range(rows)),
            ints((position - W + 1).clamp(min=0)),
            ints(position),
        ),
        "pool": (ints(torch.randint(0, PAGES, (seqs, entries // PAGE))), ints([entries] * rows), indices.int()),
        "sink": torch.randn(64, device=DEV),
        "turn": turn(rows),
    }


def attend(case: dict[str, Any], held: Any, which: int, launch: Any, formats: Any) -> torch.Tensor:
    near, far = (pages[which] for pages in held)
    window, pool = (near, *case["lists"]), (far, *case["pool"])
    given = formats if which == 0 else (None, None)
    return attention.attend(case["q"], window, pool, case["sink"], SCALE, launch, case["turn"], (W, X), given)


def scored(rows: int, entries: int) -> tuple[torch.Tensor, ...]:
    table = ints(torch.randint(0, PAGES, (rows, entries // PAGE)))
    drawn = torch.randn(rows, 64, 128, device=DEV).to(BF), torch.randn(rows, 64, device=DEV).to(BF)
    return *drawn, table, ints(range(rows)), ints([entries] * rows)


def pick(case: tuple[torch.Tensor, ...], held: Any, which: int, entries: int) -> torch.Tensor:
    options: dict[str, Any] = {"k": X, "max_visible": entries, "stepwise": True}
    options["key_format"] = KEYS if which == 0 else None
    return index.index_topk(*case[:2], held[which], *case[2:], **options)


def kernels() -> None:
    """Every work twice: bits first, then microseconds of both kinds of memory."""
    torch.manual_seed(0)
    works: list[tuple[str, Callable[[int], list[Callable[[], torch.Tensor]]], bool]] = []
    for family, formats in FAMILIES.items():
        near = memory(formats[0])
        held = near, near if formats[0] == formats[1] else memory(formats[1])
        for rows, launches in LAUNCHES.items():
            cases = [attended(rows) for _ in range(SETS[rows])]
            for numbers in launches:
                launch = launch_of(numbers)
                works.append((
                    f"{family} attention {rows} rows {numbers}",
                    lambda which, c=cases, h=held, n=launch, f=formats: [partial(attend, x, h, which, n, f) for x in c],
                    launch.stream,
                ))  # fmt: skip
    keys = memory(KEYS)
    for rows, entries in ((1, 1024), (1, 8192), (8, 8192), (32, 8192), (1, 65536), (4096, 8192)):
        cases = [scored(rows, entries) for _ in range(SETS[rows])]
        works.append((
            f"index choice {rows} rows of {entries}",
            lambda which, c=cases, e=entries: [partial(pick, x, keys, which, e) for x in c],
            False,
        ))  # fmt: skip
    for name, format in (("v4", V4), ("v4.1 pool", V41_POOL), ("keys", KEYS)):
        for rows in (1, 32, 4096):
            x, angle = torch.randn(rows, format.dim, device=DEV).to(BF), torch.randn(rows, 32, device=DEV)
            pages = (
                torch.zeros(PAGES, PAGE, format.row_bytes, dtype=torch.uint8, device=DEV),
                torch.zeros(PAGES, PAGE, format.dim, dtype=BF, device=DEV),
            )
            options: dict[str, Any] = {"eps": 1e-6, "quant": format.quant, "dims": format.dims, "tail_bf16": True}
            options |= {"write_T": torch.randperm(PAGES * PAGE, device=DEV)[:rows], "hadamard": format is KEYS}

            def write(which: int, a: Any = (x, angle), p: Any = pages, o: Any = options, f: Any = format) -> Any:
                row_finish(a[0], a[1].cos(), a[1].sin(), pages_NBD=p[which], **o)
                return decode_rows(p[0], f, BF) if which == 0 else p[1]

            works.append((f"write {rows} rows, {name}", lambda which, w=write: [partial(w, which)], False))
    torch.cuda.synchronize()
    with recorded(90) as found:
        for _, calls, _ in works:
            for which in (0, 1):
                calls(which)[0]()
    compile_kernels(found, 90)
    print(f"{len(found)} kernels compiled after {time.time() - START:.0f} s", flush=True)
    for name, calls, _ in sorted(works, key=lambda work: work[2]):
        print(f"{name:44s}", end=" ", flush=True)
        got, want = (calls(which)[0]().float() for which in (0, 1))
        same = torch.equal(got, want)
        off = "" if same else f", off by {float((got - want).abs().max()):.3g} of {float(want.abs().max()):.3g}"
        if name.startswith("write"):
            print("same values" if same else f"DIFFER{off}", flush=True)
            continue
        codes, plain = (timed(calls(which), 5) for which in (0, 1))
        print(f"codes {codes:8.1f} us, plain {plain:8.1f} us, bits {'same' if same else 'DIFFER' + off}", flush=True)


def model() -> None:
    """Steps of `flash-4layer` behind 4,096 tokens, and a prompt, with codes and with plain rows."""
    for kind, stored in (("codes", {"cuda"}), ("plain", set[str]())):
        cache.STORED_ON = frozenset(stored)  # type: ignore[misc]
        llm = LLM("flash-4layer", device="cuda", images=0, load="dummy", max_step_tokens=4096, max_sequences=32,
                  max_length=8448, prefix_cache_bytes=0, cache_bytes=4 << 30)  # fmt: skip
        print(f"{kind}: ready after {time.time() - START:.0f} s", flush=True)
        prompt = min(prefill_seconds(llm, 4096, seed) for seed in range(3))
        steps = {batch: decode_seconds(llm, batch, 4096, 24, None) for batch in (1, 8, 32)}
        shown = ", ".join(
            f"{batch} rows {1e3 * step:.3f} ms ({count} kernels)" for batch, (step, count) in steps.items()
        )
        print(f"{kind}: prompt of 4,096 {1e3 * prompt:.1f} ms; decode {shown}", flush=True)
        del llm
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    for part in sys.argv[1:] or ["kernels", "model"]:
        {"kernels": kernels, "model": model}[part]()
