"""What a sub-layer reads from the streams, and how it will write into them (spec v4 3.2; v41 4.3)."""

from __future__ import annotations

import torch

from spyglass.ops.fake_quant.reference import fake_quant
from spyglass.ops.hyper_collapse.reference import hyper_collapse
from spyglass.ops.hyper_mix.reference import hyper_mix
from spyglass.ops.rms_norm.reference import rms_norm
from spyglass.quant.formats import FakeQuant


def hyper_read(
    streams_TMC: torch.Tensor,
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
    """x_TC = rms_norm(hyper_collapse(streams, pre)) with `eps` and `weight_C`, then pre, post, comb of `hyper_mix`.

    The streams are read by `pre_TM` where it is given (V4.1), else by the pre that is found here. With `quant` a fifth
    result is `fake_quant` of x.
    """
    pre, post, comb = hyper_mix(streams_TMC, fn_JE, scale_3, base_J, norm_eps=norm_eps, hc_eps=hc_eps, rounds=rounds)
    x_TC = hyper_collapse(streams_TMC, pre if pre_TM is None else pre_TM)
    x_TC = rms_norm(x_TC, weight_C, eps=eps)
    return (x_TC, pre, post, comb, *(() if quant is None else (fake_quant(x_TC, quant),)))
