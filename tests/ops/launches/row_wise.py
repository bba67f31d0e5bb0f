"""Launches of ops that take rows one by one: a function each; `train_<op>` is what its backward launches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import FakeQuant
from tests.ops.triton_lane import CODES, Launch, meta

V41_POOL = {"quant": FakeQuant(element="e2m1", block=16, scale="e4m3")}
V41_WINDOW = {"quant": FakeQuant(element="e4m3", block=32)}


def add_shared() -> Iterator[Launch]:
    """Routed and shared outputs."""
    yield Launch(args=(meta(128, 4096, dtype=torch.float32), meta(128, 4096)))


def cache_write() -> Iterator[Launch]:
    """Rows of windows, pools, index keys and carried state."""
    for width, dtype in ((512, torch.bfloat16), (128, torch.bfloat16), (2048, torch.float32)):
        pages, rows = meta(9, 64, width, dtype=dtype), meta(128, width, dtype=dtype)
        yield Launch(args=(pages, rows, meta(128, dtype=torch.int64)))


def compress_pool() -> Iterator[Launch]:
    """Groups of 4 with overlap, of 128 and of 2 rows."""
    for width, sources, overlap in ((2048, 8, True), (512, 8, True), (1024, 128, False), (1024, 2, False)):
        rows = meta(128, width, dtype=torch.float32)
        options = {"overlap": overlap, "out_dtype": torch.bfloat16}
        yield Launch(args=(rows, rows, meta(9, sources, dtype=torch.int32)), options=options)


def compress_rows() -> Iterator[Launch]:
    """Un-pooled rows of the compressors: with positional bias (V4) and without (V4.1)."""
    for width, ratio in ((1024, 4), (512, 128), (256, 4), (512, 0)):
        kv, ape = meta(128, width, dtype=torch.float32), meta(ratio, width, dtype=torch.float32)
        yield Launch(args=(kv, kv, ape if ratio else None, meta(128, dtype=torch.int64)))


def engram_gate() -> Iterator[Launch]:
    """Streams of V4.1, with images and without."""
    weights = meta(4, 5120, dtype=torch.float32), meta(4, 5120, dtype=torch.float32)
    for images in (None, meta(32, dtype=torch.bool)):
        options = {"eps": 1e-6, "is_image_T": images}
        yield Launch(args=(meta(32, 4, 5120), meta(32, 5 * 5120), *weights), options=options)


def fake_quant() -> Iterator[Launch]:
    """Inputs of FP8 and FP4 maps, stored rows, index rows."""
    for block in (128, 32):
        yield Launch(args=(meta(128, 4096), FakeQuant(element="e4m3", block=block)))
    options = {"dims": 448, "tail_bf16": True}
    yield Launch(args=(meta(128, 512), FakeQuant(element="e4m3", block=64)), options=options)
    yield Launch(args=(meta(128, 512), FakeQuant(element="e2m1", block=16, scale="e4m3")))
    yield Launch(args=(meta(128, 64, 128), FakeQuant(element="e2m1", block=32)))


def hadamard() -> Iterator[Launch]:
    """Index queries and keys."""
    yield Launch(args=(meta(128, 64, 128),))


def hyper_collapse() -> Iterator[Launch]:
    """Streams of V4 and V4.1."""
    yield Launch(args=(meta(128, 4, 4096), meta(128, 4, dtype=torch.float32)))


def hyper_expand() -> Iterator[Launch]:
    """Streams of V4 and V4.1."""
    post, comb = meta(128, 4, dtype=torch.float32), meta(128, 4, 4, dtype=torch.float32)
    yield Launch(args=(meta(128, 4096), meta(128, 4, 4096), post, comb))


def hyper_head() -> Iterator[Launch]:
    """The streams at the end."""
    weights = (meta(*shape, dtype=torch.float32) for shape in ((4, 4 * 4096), (1,), (4,)))
    yield Launch(args=(meta(32, 4, 4096), *weights), options={"norm_eps": 1e-6, "hc_eps": 1e-6})


def hyper_mix() -> Iterator[Launch]:
    """Streams of V4 and V4.1, few rows and many."""
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20}
    for rows, width in ((1, 4096), (4096, 4096), (128, 5120)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,)))
        yield Launch(args=(meta(rows, 4, width), *weights), options=options)


def train_hyper_mix() -> None:
    """What backwards launch."""
    from spyglass.ops.hyper_mix import triton_training as kernels
    from spyglass.ops.hyper_mix.triton_kernel import project

    fp32, rows, width = torch.float32, 4096, 4096
    streams, row = meta(rows, 4, width), meta(rows, width)
    fn_JE, four, square = meta(24, 4 * width, dtype=fp32), meta(rows, 4, dtype=fp32), meta(rows, 4, 4, dtype=fp32)
    read = kernels.read_gradient(streams, four, meta(width, dtype=fp32), row, 1e-6)
    weights, options = (meta(3, dtype=fp32), meta(24, dtype=fp32)), {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20}
    sums = project(streams, fn_JE)
    dp_TJ, kappa_T = kernels.mix_gradient(sums, *weights, four, four, square, width, **options)
    both = (read, kernels.Mixed(dp_TJ=dp_TJ, kappa_T=kappa_T, fn_JE=fn_JE))
    kernels.streams_gradient(streams, None, both, None)
    for shared, z in ((None, row), (row, meta(rows, width, dtype=fp32))):
        written = kernels.Written(z_TC=z, shared_TC=shared, streams_TMC=streams, post_TM=four, comb_TMM=square)
        for reads in (both, None):
            kernels.streams_gradient(streams, streams, reads, written)


def hyper_read() -> Iterator[Launch]:
    """Streams of V4 and V4.1, few rows and many."""
    options = {
        "norm_eps": 1e-6,
        "hc_eps": 1e-6,
        "rounds": 20,
        "eps": 1e-6,
        "quant": FakeQuant(element="e4m3", block=128),
    }
    for rows, width, shifted in ((1, 4096, False), (4096, 4096, False), (128, 5120, True)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,), (width,)))
        pre = meta(rows, 4, dtype=torch.float32) if shifted else None
        yield Launch(args=(meta(rows, 4, width), *weights), options={**options, "pre_TM": pre})


def hyper_write_read() -> Iterator[Launch]:
    """Streams of V4 and V4.1, few rows and many, after attention and after experts."""
    options = {
        "norm_eps": 1e-6,
        "hc_eps": 1e-6,
        "rounds": 20,
        "eps": 1e-6,
        "quant": FakeQuant(element="e4m3", block=128),
    }
    for rows, width, shared in ((1, 4096, False), (12, 4096, True), (4096, 4096, True), (128, 5120, True)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,), (width,)))
        post, comb = meta(rows, 4, dtype=torch.float32), meta(rows, 4, 4, dtype=torch.float32)
        z = (meta(rows, width, dtype=torch.float32), meta(rows, width)) if shared else (meta(rows, width), None)
        pre = post if width == 5120 else None
        args = (*z, meta(rows, 4, width), post, comb, *weights)
        yield Launch(args=args, options={**options, "pre_TM": pre})


def lora_delta() -> Iterator[Launch]:
    """Adapters of the widest map, of a grouped one, and of one with fp32 activations."""
    for dtype, groups, inner, outer in ((torch.bfloat16, 1, 1024, 32768), (torch.bfloat16, 8, 4096, 1024)):
        for own in (torch.float32, dtype):
            adapter_ids, scales = meta(128, dtype=torch.int32), meta(128, dtype=torch.float32)
            a, b = meta(128, inner, dtype=own), meta(128, groups, outer, dtype=own)
            yield Launch(
                args=(meta(64, groups, inner, dtype=dtype), meta(64, dtype=torch.int32), a, b, adapter_ids, scales)
            )


def rms_norm() -> Iterator[Launch]:
    """Rows of the residual, of the low ranks, and heads."""
    for width in (512, 1024, 1536, 4096, 5120):
        yield Launch(args=(meta(128, width), meta(width, dtype=torch.float32)), options={"eps": 1e-6})
    yield Launch(args=(meta(128, 1152), meta(1152)), options={"eps": 1e-6})
    yield Launch(args=(meta(128, 64, 512), None), options={"eps": 1e-6})
    for width, block in ((1024, 128), (1280, 32)):
        options = {"eps": 1e-6, "quant": FakeQuant(element="e4m3", block=block)}
        yield Launch(args=(meta(128, width), meta(width, dtype=torch.float32)), options=options)


def train_rms_norm() -> None:
    from spyglass.ops.rms_norm.triton_training import norm_gradient

    weight = meta(4096, dtype=torch.float32)
    norm_gradient(meta(4096, 4096), weight, meta(4096, 4096), meta(4096, 4096), 1e-6, False)
    norm_gradient(meta(4096, 512), None, meta(4096, 512), meta(4096, 512), 1e-6, True)


def rope_half() -> Iterator[Launch]:
    """Queries and keys of the picture tower."""
    tables = meta(784, 32, dtype=torch.float32), meta(784, 32, dtype=torch.float32)
    yield Launch(args=(meta(784, 3, 16, 64)[:, :2].flatten(1, 2), *tables))


def rope_partial() -> Iterator[Launch]:
    """Query heads and their outputs, stored rows, index queries."""
    tables = meta(128, 32, dtype=torch.float32), meta(128, 32, dtype=torch.float32)
    yield Launch(args=(meta(128, 64, 512), *tables))
    yield Launch(args=(meta(128, 64, 512), *tables), options={"inverse": True})
    yield Launch(args=(meta(128, 512), *tables))
    yield Launch(args=(meta(128, 64, 128), *tables))


def row_finish() -> Iterator[Launch]:
    """Query heads, window rows of V4 and V4.1, index queries and keys."""
    tables = meta(128, 32, dtype=torch.float32), meta(128, 32, dtype=torch.float32)
    norm = {"weight_D": meta(512, dtype=torch.float32), "eps": 1e-6}
    pages = {"pages_NBD": meta(9, 64, 512), "write_T": meta(128, dtype=torch.int64)}
    yield Launch(args=(meta(128, 64, 512), *tables), options={"eps": 1e-6, "stepwise": True})
    fp8 = {"quant": FakeQuant(element="e4m3", block=64), "dims": 448, "tail_bf16": True}
    yield Launch(args=(meta(128, 512), *tables), options={**norm, **fp8, **pages})
    for width, quant in ((584, fp8), (528, V41_WINDOW), (288, V41_POOL)):  # pages of codes
        codes = pages | {"pages_NBD": meta(9, 64, width, dtype=CODES)}
        yield Launch(args=(meta(128, 512), *tables), options={**norm, **quant, **codes})
    fp4 = V41_POOL
    yield Launch(args=(meta(128, 512), *tables), options={**norm, **fp4, **pages})
    index = {"hadamard": True, "quant": FakeQuant(element="e2m1", block=32)}
    yield Launch(args=(meta(128, 64, 128), *tables), options=index)
    weight, keys = meta(128, dtype=torch.float32), {"pages_NBD": meta(9, 64, 128), "write_T": pages["write_T"]}
    for held in (keys, keys | {"pages_NBD": meta(9, 64, 68, dtype=CODES)}):
        yield Launch(args=(meta(128, 128), *tables), options={**index, **held, "weight_D": weight, "eps": 1e-6})


def train_row_finish() -> None:
    from spyglass.ops.row_finish.triton_training import finish_gradient

    tables = meta(128, 32, dtype=torch.float32), meta(128, 32, dtype=torch.float32)
    for heads, dim, norm, hadamard in ((64, 512, True, False), (1, 512, True, False), (64, 128, False, True)):
        x = meta(128, heads, dim)
        weight = meta(dim, dtype=torch.float32) if heads == 1 else None
        eps = 1e-6 if norm else None
        finish_gradient(x, *tables, x, x, weight_D=weight, eps=eps, stepwise=heads == 64, hadamard=hadamard)


def silu_mul() -> Iterator[Launch]:
    """The MLP of the picture tower."""
    yield Launch(args=(meta(784, 2 * 4304),))


def train_silu_mul() -> None:
    from spyglass.ops.silu_mul.triton_training import gate_gradient

    gate_gradient(meta(4096, 5632), meta(4096, 2816), meta(4096, 5632))


def swiglu() -> Iterator[Launch]:
    """Shared expert of V4 and V4.1."""
    for quant in (None, FakeQuant(element="e4m3", block=128)):
        yield Launch(args=(meta(128, 2048), meta(128, 2048)), options={"limit": 10.0, "quant": quant})


def vit_attention() -> Iterator[Launch]:
    """Attention of the picture tower."""
    offsets = (0, 784, 784 + 3312)
    for heads, dim in ((16, 64), (16, 128), (4, 32)):
        q = meta(offsets[-1], heads, dim)
        cu_seqlens = meta(3, dtype=torch.int32)
        yield Launch(args=(q, q, q, cu_seqlens), options={"offsets": offsets, "scale": dim**-0.5})
