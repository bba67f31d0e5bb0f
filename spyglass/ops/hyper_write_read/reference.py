"""The streams after a sub-layer, and what the next one reads from them (spec v4 3.2; v41 4.3)."""

from __future__ import annotations

from typing import Any

import torch

from spyglass.ops.add_shared.reference import add_shared
from spyglass.ops.hyper_expand.reference import hyper_expand
from spyglass.ops.hyper_read.reference import hyper_read
from spyglass.quant.formats import FakeQuant


def hyper_write_read(
    z_TC: torch.Tensor,
    shared_TC: torch.Tensor | None,
    streams_TMC: torch.Tensor,
    post_TM: torch.Tensor,
    comb_TMM: torch.Tensor,
    fn_JE: torch.Tensor,
    scale_3: torch.Tensor,
    base_J: torch.Tensor,
    weight_C: torch.Tensor,
    *,
    pre_TM: torch.Tensor | None = None,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
    eps: float,
    quant: FakeQuant | None = None,
) -> tuple[torch.Tensor, ...]:
    """streams' = hyper_expand(z, streams, post, comb), then x, pre, post and comb as `hyper_read` finds them there.

    With `shared_TC`, z is what `add_shared` makes of both.
    """
    if shared_TC is not None:
        z_TC = add_shared(z_TC, shared_TC)
    streams_TMC = hyper_expand(z_TC, streams_TMC, post_TM, comb_TMM)
    weights = fn_JE, scale_3, base_J, weight_C
    numbers: dict[str, Any] = {"norm_eps": norm_eps, "hc_eps": hc_eps, "rounds": rounds, "eps": eps}
    return streams_TMC, *hyper_read(streams_TMC, *weights, pre_TM=pre_TM, quant=quant, **numbers)
