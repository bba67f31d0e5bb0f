"""The maps of V4: few rows, tiles, and weights decoded once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spyglass.quant.formats import BF16, FP4, FakeQuant, fp8
from spyglass.quant.packed import empty_packed
from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    options = {"rounding": FakeQuant(element="e4m3", block=128)}
    for rows in (1, 32, 128, 4096):
        for shape in ((32768, 1024), (4096, 8192)):
            weight = empty_packed(fp8((128, 128)), shape, "meta")
            yield Launch(args=(meta(rows, shape[1]), weight), options=options)
    yield Launch(args=(meta(8, 4096), empty_packed(BF16, (2048, 4096), "meta")))


def train() -> None:
    """What a training step launches around its products."""
    from spyglass.ops.linear_block import triton_training as kernels

    for width, rounding in ((4096, FakeQuant(element="e4m3", block=128)), (5120, FakeQuant(element="e4m3", block=32))):
        kernels.round_into(meta(4096, width), meta(4096, width + 96)[:, :width], rounding)
    kernels.round_into(meta(4096, 1024), meta(4096, 1120)[:, :1024], None)
    for format in (FP4, fp8((128, 128)), fp8((32, 32))):
        weight = empty_packed(format, (4, 1024, 4096), "meta")
        assert weight.scale is not None
        for chosen in (None, meta(4, dtype=torch.int64)):
            kernels.decode_into(weight.data, weight.scale, format, meta(4, 1024, 4192)[:, :, :4096], chosen)
    fp32 = torch.float32
    adapter_ids = (meta(4096, dtype=torch.int32), meta(16, dtype=torch.int32))
    for kind in (kernels.EACH, kernels.LEFT, kernels.RIGHT):
        parts = kernels.parts(kind)
        kernels.place_parts(meta(4, 16, 4096, dtype=fp32).mT, meta(4, 4096, 16, parts), kind)
    kernels.place_parts(
        meta(1, 4096, 48, dtype=fp32),
        meta(1, 4096, 16, 6),
        kernels.LEFT,
        sums=3,
        scale_GR=meta(1, 16, dtype=fp32),
        adapter_ids=adapter_ids,
        value_GNR=meta(1, 4096, 16, dtype=fp32),
    )
