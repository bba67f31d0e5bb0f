"""Gates of V4 and V4.1: by score, with pictures, by token; few rows and many."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.ops.triton_lane import Launch, meta


def launches() -> Iterator[Launch]:
    for rows, width, experts in ((1, 4096, 256), (12, 5120, 384), (32, 5120, 384), (4096, 4096, 256)):
        args = meta(rows, width), meta(experts, width, dtype=torch.float32)
        bias = meta(experts, dtype=torch.float32)
        options = {"k": 6, "scale": 1.5}
        pictures = {"is_image_T": meta(rows, dtype=torch.bool), "bias_image_E": bias}
        forced = {"forced_TK": meta(129280, 6, dtype=torch.int32), "forced_row_T": meta(rows, dtype=torch.int64)}
        yield Launch(args=args, options={**options, "bias_E": bias})
        yield Launch(args=args, options={**options, "bias_E": bias, **pictures})
        yield Launch(args=args, options={**options, "bias_E": None, **pictures, **forced})
