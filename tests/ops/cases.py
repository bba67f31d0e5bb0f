"""One table of calls of every op, as inputs on the host: what the reference, the compiled CPU kernels, Triton (on a GPU
and in its interpreter), gradients and captured steps are all asked to compute.

`CASES[op, name](Source(dtype, rows))` is a `Call`, for any number of rows from 1 up. What an op must not read is NaN:
pages that no sequence holds, rows before a window and after the end of a sequence, unused rows of the compressor state.
With four rows or more the last one is padding: it sees nothing, has no expert and is written nowhere; its results need
only be finite. Sources, indices and blocks of -1, experts without rows and adapters without weights here all occur.

A new op gets its builder here, and with it every test that reads the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from spyglass.quant.formats import BF16, F32, FP4, FakeQuant, Format, fp8
from tests.ops.adapter_cases import engram_gate, expert_adapters, lora_delta
from tests.ops.call import Call, Source
from tests.ops.paged_cases import FAR, KEYS, NEAR, index_blocks, index_topk, sparse_attention
from tests.ops.row_cases import (
    E4M3,
    MERGED,
    hyper_collapse,
    hyper_expand,
    hyper_head,
    hyper_mix,
    hyper_read,
    hyper_write_read,
    row_finish,
)

E2M1 = FakeQuant(element="e2m1", block=32)


def linear_block(
    source: Source,
    format: Format = BF16,
    *,
    shape: tuple[int, int] = (72, 192),
    rounding: FakeQuant | None = None,
    extras: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Call:
    outputs, inner = shape
    options: dict[str, Any] = {"rounding": rounding, "out_dtype": out_dtype}
    if extras:
        options |= {"addend_TO": source.fp32(source.rows, outputs), "bias_O": source.fp32(outputs)}
    args = (source.normal(source.rows, inner), source.weight(outputs, inner, format=format))
    return Call(args=args, options=options)


def linear_grouped(source: Source, format: Format = BF16, *, addend: bool = True) -> Call:
    options = {"addend_TGO": source.fp32(source.rows, 2, 40)} if addend else {}
    args = (source.normal(source.rows, 2, 96), source.weight(80, 96, format=format))
    return Call(args=args, options=options)


def linear_argmax(source: Source, format: Format = BF16) -> Call:
    args = (source.normal(source.rows, 192), source.weight(72, 192, format=format), source.below(4, 72) == 0)
    return Call(args=args, options={})


def experts_grouped(
    source: Source,
    format: Format = BF16,
    rounding: FakeQuant | None = None,
    sizes: tuple[int, int, int, int] = (6, 96, 64, 2),
    adapters: torch.dtype | None = None,
) -> Call:
    """Expert 3 has no rows; rows that drew it have one expert less."""
    experts, width, hidden, chosen = sizes
    ids = source.choices(experts, chosen)
    ids[ids == 3] = -1
    if source.padding:
        ids[-1] = -1
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    stacks = [source.weight(experts, *shape, format=format) for shape in shapes]
    args = (source.normal(source.rows, hidden), ids, source.uniform(source.rows, chosen), *stacks)
    options: dict[str, Any] = {"limit": 0.8, "rounding": rounding}
    if adapters is not None:
        options |= expert_adapters(source, sizes, adapters)
    return Call(args=args, options=options, padding=source.padding)


def router_topk(
    source: Source,
    *,
    images: bool = False,
    forced: str = "",
    bias: bool = True,
    padding: bool = False,
    sizes: tuple[int, int, int] = (9, 64, 3),
    weight_dtype: torch.dtype | None = None,
) -> Call:
    experts, hidden, k = sizes
    options: dict[str, Any] = {"k": k, "scale": 1.5, "bias_E": source.fp32(experts, scale=0.1) if bias else None}
    if images:
        options["is_image_T"] = torch.arange(source.rows) % 3 == 0
        options["bias_image_E"] = source.fp32(experts, scale=0.1)
    if forced:
        options["forced_TK"] = source.choices(experts, k).long()
    if forced == "table":
        options["forced_row_T"] = source.below(source.rows, source.rows).long()
    if padding:
        options["positions_T"] = (source.below(4, source.rows) - 1).int()
    args = (source.normal(source.rows, hidden), source.normal(experts, hidden, dtype=weight_dtype, scale=0.3))
    return Call(args=args, options=options)


def compress_pool(source: Source, *, overlap: bool, state: bool = True, out_dtype: torch.dtype = torch.float32) -> Call:
    group, width = (8, 4 * 24) if overlap else (4, 2 * 24)
    sources = source.below(source.rows + 12, 6, group) - 12 if state else source.below(source.rows, 6, group)
    sources[0, : group // 2] = -1
    sources[:, -1] = source.rows // 2  # at least one source is there
    rows, kept = source.fp32(source.rows, width), source.fp32(15, width)
    named = sources[sources <= -2]
    kept[[i for i in range(15) if i not in (-named - 2).tolist()]] = float("nan")
    args = (rows, kept if state else None, sources.int())
    return Call(args=args, options={"overlap": overlap, "out_dtype": out_dtype})


def compress_rows(source: Source, *, ape: bool = True) -> Call:
    kv, gate, bias = source.fp32(source.rows, 40), source.fp32(source.rows, 40), source.fp32(4, 40)
    return Call(args=(kv, gate, bias if ape else None, torch.arange(source.rows) % 4), options={}, exact=True)


def rope_partial(source: Source, *, inverse: bool = False, heads: tuple[int, ...] = (3,)) -> Call:
    angle = source.fp32(source.rows, 8, scale=9.0)
    args = (source.normal(source.rows, *heads, 40), angle.cos(), angle.sin())
    return Call(args=args, options={"inverse": inverse})


def rope_half(source: Source) -> Call:
    angle = source.fp32(source.rows, 16)
    wide = source.normal(source.rows, 3, 3, 32)
    return Call(args=(wide[:, :2].flatten(1, 2), angle.cos(), angle.sin()), options={})


def silu_mul(source: Source) -> Call:
    return Call(args=(source.normal(source.rows, 2 * 1100, scale=3.0),), options={})


def swiglu(source: Source, quant: FakeQuant | None = None) -> Call:
    gate, up = (source.normal(source.rows, 72, scale=3.0) for _ in range(2))
    return Call(args=(gate, up), options={"limit": 2.0, "quant": quant}, flips=quant is not None)


def add_shared(source: Source) -> Call:
    return Call(args=(source.fp32(source.rows, 72), source.normal(source.rows, 72)), options={}, exact=True)


def rms_norm(
    source: Source, width: int = 96, dtype: torch.dtype | None = torch.float32, quant: FakeQuant | None = None
) -> Call:
    x = source.normal(source.rows, width) if dtype else source.normal(source.rows, 5, width)
    weight = source.normal(width, dtype=dtype) if dtype else None
    return Call(args=(x, weight), options={"eps": 0.02, "quant": quant}, flips=quant is not None)


def fake_quant(source: Source, spec: FakeQuant, dims: int | None = 160) -> Call:
    wide = source.fp32(source.rows, 200).exp().to(source.dtype) * (source.below(3, source.rows, 200) - 1)
    return Call(args=(wide.to(source.dtype), spec), options={"dims": dims, "tail_bf16": dims is not None}, exact=True)


def hadamard(source: Source, width: int = 128) -> Call:
    return Call(args=(source.normal(source.rows, 3, width),), options={})


def cache_write(source: Source, page_dtype: torch.dtype | None = None) -> Call:
    pages = source.normal(source.rows // 6 + 2, 6, 32, dtype=page_dtype)
    write = torch.randperm(pages.shape[0] * 6, generator=source.generator)[: source.rows]
    write[::5] = -1
    return Call(args=(pages, source.normal(source.rows, 32), write), options={}, exact=True, written=0)


def vit_attention(source: Source, heads: int = 2, dim: int = 64) -> Call:
    offsets = tuple(sorted({0, 1, source.rows // 2, source.rows}))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    q, k, v = (source.normal(source.rows, heads, dim) for _ in range(3))
    return Call(args=(q, k, v, cu_seqlens), options={"offsets": offsets, "scale": dim**-0.5})


Builder = Callable[[Source], Call]
FP8, FP8_SMALL = fp8((128, 128)), fp8((32, 32))
_VARIANTS: dict[str, dict[str, Builder]] = {
    "linear_block": {
        "bf16": linear_block,
        "bf16 alone": lambda s: linear_block(s, extras=False),
        "bf16 wide out": lambda s: linear_block(s, shape=(130, 160), out_dtype=torch.float32),
        "f32": lambda s: linear_block(s, F32, shape=(33, 48)),
        "fp8": lambda s: linear_block(s, FP8, rounding=E4M3),
        "fp8 even": lambda s: linear_block(s, FP8, shape=(128, 256), rounding=E4M3),
        "fp8 odd": lambda s: linear_block(s, FP8, shape=(130, 160), rounding=E4M3, extras=False),
        "fp8 32": lambda s: linear_block(s, FP8_SMALL, rounding=E4M3),
        "fp8 f32 scales": lambda s: linear_block(s, fp8((128, 128), "F32"), rounding=E4M3),
        "fp4": lambda s: linear_block(s, FP4, rounding=E4M3),
        "fp4 odd": lambda s: linear_block(s, FP4, shape=(70, 160), rounding=E2M1, extras=False),
    },
    "linear_grouped": {"bf16": linear_grouped, "bf16 alone": lambda s: linear_grouped(s, addend=False)}
    | {format.name: partial(linear_grouped, format=format) for format in (FP8_SMALL, FP4)},
    "linear_merged": MERGED,
    "linear_argmax": {"bf16": linear_argmax, "fp8": lambda s: linear_argmax(s, FP8)},
    "experts_grouped": {
        "bf16": experts_grouped,
        "fp8": lambda s: experts_grouped(s, FP8_SMALL, E4M3),
        "fp4": lambda s: experts_grouped(s, FP4, E4M3),
        "fp4 even": lambda s: experts_grouped(s, FP4, E4M3, (6, 128, 128, 2)),
        "fp4 many": lambda s: experts_grouped(s, FP4, None, (17, 32, 160, 6)),
        "adapters": lambda s: experts_grouped(s, FP4, E4M3, (6, 128, 128, 2), adapters=torch.float32),
        "bf16 adapters": lambda s: experts_grouped(s, adapters=torch.bfloat16),
    },
    "engram_gate": {"text": engram_gate, "images": lambda s: engram_gate(s, images=True)},
    "lora_delta": {"dense": lambda s: lora_delta(s, 1), "groups": lambda s: lora_delta(s, 3)},
    "router_topk": {
        "text": router_topk,
        "no bias": lambda s: router_topk(s, bias=False),
        "padding": lambda s: router_topk(s, padding=True),
        "images": lambda s: router_topk(s, images=True),
        "hashed": lambda s: router_topk(s, images=True, forced="rows"),
        "hash table": lambda s: router_topk(s, images=True, forced="table"),
        "wide": lambda s: router_topk(s, sizes=(67, 200, 6), weight_dtype=torch.float32),
    },
    "sparse_attention": {
        "window": sparse_attention,
        "pool": lambda s: sparse_attention(s, pool=True),
        "top-k": lambda s: sparse_attention(s, pool=True, topk="chosen"),
        "first of top-k": lambda s: sparse_attention(s, pool=True, topk="first"),
        "bounds": lambda s: sparse_attention(s, pool=True, slack=9),
        "turned": lambda s: sparse_attention(s, turned=True),
        "turned, top-k": lambda s: sparse_attention(s, pool=True, topk="chosen", turned=True),
        "many heads": lambda s: sparse_attention(s, pool=True, topk="chosen", heads=20, dim=64, window=21),
        "codes": lambda s: sparse_attention(s, pool=True, topk="chosen", turned=True, formats=(NEAR, NEAR)),
        "codes, window": lambda s: sparse_attention(s, formats=(NEAR, None)),
        "codes of two kinds": lambda s: sparse_attention(s, pool=True, formats=(NEAR, FAR), slack=9),
    },
    "index_topk": {
        "all": index_topk,
        "blocks": lambda s: index_topk(s, blocks=True),
        "stepwise": lambda s: index_topk(s, stepwise=True),
        "bounds": lambda s: index_topk(s, slack=7, k=11),
        "codes": lambda s: index_topk(s, stepwise=True, format=KEYS),
        "codes, blocks": lambda s: index_topk(s, blocks=True, stepwise=True, format=KEYS),
    },
    "index_blocks": {
        "all": index_blocks,
        "stepwise": lambda s: index_blocks(s, stepwise=True),
        "bounds": lambda s: index_blocks(s, slack=7),
        "even blocks": lambda s: index_blocks(s, slack=7, block_size=4),
        "even blocks, stepwise": lambda s: index_blocks(s, block_size=2, stepwise=True),
        "codes": lambda s: index_blocks(s, block_size=4, stepwise=True, format=KEYS),
    },
    "compress_pool": {
        "overlap": lambda s: compress_pool(s, overlap=True),
        "plain": lambda s: compress_pool(s, overlap=False, out_dtype=torch.bfloat16),
        "no state": lambda s: compress_pool(s, overlap=True, state=False),
    },
    "compress_rows": {"ape": compress_rows, "no ape": lambda s: compress_rows(s, ape=False)},
    "hyper_mix": {"four": hyper_mix, "odd": lambda s: hyper_mix(s, 3, 33, 1)},
    "hyper_head": {"four": hyper_head, "odd": lambda s: hyper_head(s, 3, 33)},
    "hyper_collapse": {"four": hyper_collapse, "odd": lambda s: hyper_collapse(s, 3, 33)},
    "hyper_expand": {"four": hyper_expand, "odd": lambda s: hyper_expand(s, 3, 33)},
    "hyper_read": {
        "four": hyper_read,
        "shifted": lambda s: hyper_read(s, shifted=True),
        "rounded": lambda s: hyper_read(s, quant=FakeQuant(element="e4m3", block=32)),
        "odd": lambda s: hyper_read(s, 3, 33),
    },
    "hyper_write_read": {
        "four": hyper_write_read,
        "shared": lambda s: hyper_write_read(s, shared=True, quant=FakeQuant(element="e4m3", block=32)),
        "shifted": lambda s: hyper_write_read(s, 3, 33, shifted=True),
    },
    "row_finish": {
        "heads": lambda s: row_finish(s, 64, (5,), eps=1e-6, stepwise=True),
        "stored": lambda s: row_finish(
            s, weight_D=True, eps=1e-6, quant=FakeQuant(element="e4m3", block=16), dims=48, tail_bf16=True, pages=True
        ),
        "codes": lambda s: row_finish(s, 32, dims=16, quant=NEAR.quant, pages=True, codes=True),
        "codes, fp4": lambda s: row_finish(s, 64, quant=FAR.quant, pages=True, codes=True),
        "codes, keys": lambda s: row_finish(s, 32, quant=E2M1, pages=True, codes=True),
        "index": lambda s: row_finish(s, 128, (3,), hadamard=True, quant=E2M1),
        "odd": lambda s: row_finish(s, 40, (3,), weight_D=True, eps=1e-6),
    },
    "rope_partial": {
        "forward": rope_partial,
        "inverse": lambda s: rope_partial(s, inverse=True),
        "no heads": lambda s: rope_partial(s, heads=()),
    },
    "rope_half": {"all": rope_half},
    "silu_mul": {"all": silu_mul},
    "swiglu": {"all": swiglu, "rounded": lambda s: swiglu(s, E2M1)},
    "add_shared": {"all": add_shared},
    "rms_norm": {
        "weight": rms_norm,
        "narrow weight": lambda s: rms_norm(s, 33, torch.bfloat16),
        "heads": lambda s: rms_norm(s, 512, None),
        "rounded": lambda s: rms_norm(s, 200, quant=FakeQuant(element="e4m3", block=64)),
    },
    "fake_quant": {
        "e4m3": lambda s: fake_quant(s, FakeQuant(element="e4m3", block=64)),
        "e4m3 whole": lambda s: fake_quant(s, E4M3, None),
        "e2m1": lambda s: fake_quant(s, E2M1),
        "e2m1 e4m3": lambda s: fake_quant(s, FakeQuant(element="e2m1", block=16, scale="e4m3")),
    },
    "hadamard": {"128": hadamard, "8": lambda s: hadamard(s, 8)},
    "cache_write": {"same": cache_write, "other dtype": lambda s: cache_write(s, torch.bfloat16)},
    "vit_attention": {"64": vit_attention, "128": lambda s: vit_attention(s, 3, 128)},
}
CASES: dict[tuple[str, str], Builder] = {(op, name): b for op, cases in _VARIANTS.items() for name, b in cases.items()}
# What learns has plain rows: codes have no gradient
TRAINED = tuple(key for key in CASES if not key[1].startswith("codes"))
