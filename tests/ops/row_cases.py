"""Builders of `cases.py` for hyper-connections, merged maps and for rows that are finished in one go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.linear_merged.reference import MapStack
from spyglass.quant.formats import BF16, FP4, FakeQuant, Format, StoredRow, fp8
from spyglass.quant.rows import encode_rows
from tests.ops.call import Call, Source

E4M3 = FakeQuant(element="e4m3", block=128)


def hyper_mix(source: Source, streams: int = 4, width: int = 48, rounds: int = 4) -> Call:
    count = streams * (2 + streams)
    weights = (source.fp32(*shape, scale=0.3) for shape in ((count, streams * width), (3,), (count,)))
    options = {"norm_eps": 0.02, "hc_eps": 0.05, "rounds": rounds}
    return Call(args=(source.normal(source.rows, streams, width), *weights), options=options)


def hyper_head(source: Source, streams: int = 4, width: int = 48) -> Call:
    weights = (source.fp32(*shape, scale=0.1) for shape in ((streams, streams * width), (1,), (streams,)))
    options = {"norm_eps": 0.02, "hc_eps": 0.05}
    return Call(args=(source.normal(source.rows, streams, width), *weights), options=options)


def hyper_collapse(source: Source, streams: int = 4, width: int = 48) -> Call:
    return Call(args=(source.normal(source.rows, streams, width), source.fp32(source.rows, streams)), options={})


def hyper_expand(source: Source, streams: int = 4, width: int = 48) -> Call:
    post, comb = source.fp32(source.rows, streams), source.fp32(source.rows, streams, streams)
    z, x = source.normal(source.rows, width), source.normal(source.rows, streams, width)
    return Call(args=(z, x, post, comb), options={})


def hyper_read(
    source: Source, streams: int = 4, width: int = 48, *, shifted: bool = False, quant: FakeQuant | None = None
) -> Call:
    call = hyper_mix(source, streams, width)
    options = call.options | {"pre_TM": source.fp32(source.rows, streams) if shifted else None, "eps": 1e-6}
    options["quant"] = quant
    return Call(args=(*call.args, source.fp32(width)), options=options, flips=quant is not None)


def hyper_write_read(
    source: Source,
    streams: int = 4,
    width: int = 48,
    *,
    shifted: bool = False,
    shared: bool = False,
    quant: FakeQuant | None = None,
) -> Call:
    call, written = (
        hyper_read(source, streams, width, shifted=shifted, quant=quant),
        hyper_expand(source, streams, width),
    )
    z, x, post, comb = written.args
    comb = comb.softmax(dim=1)
    first = (source.fp32(source.rows, width), z) if shared else (z, None)
    return Call(args=(*first, x, post, comb, *call.args[1:]), options=call.options, flips=call.flips)


def row_finish(
    source: Source,
    dim: int = 64,
    heads: tuple[int, ...] = (),
    *,
    pages: bool = False,
    codes: bool = False,
    **options: Any,
) -> Call:
    """`codes`: pages are bytes of the format that the rounding says."""
    angle = source.fp32(source.rows, 8, scale=9.0)
    if options.get("weight_D") is not None:
        options["weight_D"] = source.fp32(dim)
    if pages:
        held = source.normal(source.rows // 6 + 2, 6, dim)
        write = torch.randperm(held.shape[0] * 6, generator=source.generator)[: source.rows]
        write[::5] = -1
        if codes:
            held = encode_rows(held, StoredRow(quant=options["quant"], dim=dim, dims=options.get("dims", dim)))
        options |= {"pages_NBD": held, "write_T": write}
    args = (source.normal(source.rows, *heads, dim), angle.cos(), angle.sin())
    flips = "quant" in options
    return Call(args=args, options=options, written="pages_NBD" if pages else None, flips=flips)


def linear_merged(
    source: Source, *stacks: tuple[Format, tuple[int, ...], torch.dtype | None], inner: int = 256, known: bool = False
) -> Call:
    """Maps of sizes, by stack; `known`: the rounded input is given."""
    x = source.normal(source.rows, inner)
    made = tuple(
        MapStack(
            weight=source.weight(sum(sizes), inner, format=format),
            sizes=sizes,
            rounding=E4M3 if format.name == "fp8" else None,
            out_dtype=source.dtype if dtype is None else dtype,
        )
        for format, sizes, dtype in stacks
    )
    return Call(args=(x, made), options={"rounded_TI": fake_quant(x, E4M3)} if known else {})


FP8 = fp8((128, 128))
MERGED: dict[str, Callable[[Source], Call]] = {
    "fp8": lambda s: linear_merged(s, (FP8, (128, 256), None)),
    "three stacks": lambda s: linear_merged(
        s,
        (FP8, (128, 128), None),
        (BF16, (64, 32, 96, 32), torch.float32),
        (BF16, (64,), None),
        inner=2048,
        known=True,
    ),
    "bf16": lambda s: linear_merged(s, (BF16, (32, 64), torch.float32)),
    "odd": lambda s: linear_merged(s, (BF16, (33, 7), None), inner=80),
    "other formats": lambda s: linear_merged(s, (FP4, (64, 64), None), (fp8((128, 128), "F32"), (128,), None)),
}
