"""Small models some of whose layers have their routed experts in host memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from spyglass.layers.hosted import HostSide
from spyglass.ops.table import Which, bind_ops
from spyglass.placement import PLACES
from tests.small_models import small_config, small_model
from tests.small_v41 import small_store, small_v41_config, small_v41_model

HOSTED = (1, 2)


def make(
    family: str,
    device: str,
    *,
    packed: bool = True,
    host: Collection[int] = (),
    ops: Which = "auto",
    overlaps: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """A model in bfloat16, and what `tests.captured.decode` needs with it."""
    bound = bind_ops(device, "bfloat16", ops)
    side = (
        HostSide(host, torch.device(device), places=PLACES, reference=ops == "reference", overlaps=overlaps)
        if host
        else None
    )
    options: dict[str, Any] = {
        "packed": packed, "expand": False, "dtype": torch.bfloat16, "numerics": "reference", "ops": bound,
        "device": device, "host": side,
    }  # fmt: skip
    if family == "v4":
        model = small_model(seed=5, config=small_config(index_topk=48), **options)
        more: dict[str, Any] = {}
    else:
        model, more = small_v41_model(seed=5, **options), {"store": small_store(small_v41_config())}
    if side is not None:
        side.ready()
    return model, more
