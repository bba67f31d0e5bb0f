"""Streams of V4 and V4.1, few rows and many."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    options = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20}
    for rows, width in ((1, 4096), (4096, 4096), (128, 5120)):
        weights = (meta(*shape, dtype=torch.float32) for shape in ((24, 4 * width), (3,), (24,)))
        yield Launch(args=(meta(rows, 4, width), *weights), options=options)


def train() -> None:
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
