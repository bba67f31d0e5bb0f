"""On a GPU the kernels that serve, with a backward of three launches; see `hyper_mix/triton_training.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spyglass.ops import gpu
from spyglass.ops.hyper_read import triton as read
from spyglass.ops.hyper_write_read import reference, triton
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
    """See `reference.py`, which also serves weights that are trained."""
    frozen = Frozen(fn_JE, scale_3, base_J, weight_C, norm_eps, hc_eps, rounds, eps)
    given = z_TC, shared_TC, streams_TMC, post_TM, comb_TMM
    if quant is not None or not frozen.suits(streams_TMC):
        options: dict[str, Any] = {"pre_TM": pre_TM, "quant": quant, **frozen.options}
        return reference.hyper_write_read(*given, *frozen.weights, **options)
    out: tuple[torch.Tensor, ...] = _WriteRead.apply(*given, pre_TM, frozen)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class Frozen:
    """The weights of a hyper-connection and of the norm behind it, and their constants."""

    fn_JE: torch.Tensor
    scale_3: torch.Tensor
    base_J: torch.Tensor
    weight_C: torch.Tensor
    norm_eps: float
    hc_eps: float
    rounds: int
    eps: float

    def suits(self, streams_TMC: torch.Tensor) -> bool:
        """Whether kernels with a backward take these streams, and nothing of this is trained."""
        weights, streams = (self.fn_JE, self.scale_3, self.base_J, self.weight_C), streams_TMC.shape[1]
        trained = any(weight.requires_grad for weight in weights)
        return not trained and gpu.trains(streams_TMC) and read.suits(streams_TMC, None) and not streams & (streams - 1)

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        return self.fn_JE, self.scale_3, self.base_J, self.weight_C

    @property
    def options(self) -> dict[str, Any]:
        return {"norm_eps": self.norm_eps, "hc_eps": self.hc_eps, "rounds": self.rounds, "eps": self.eps}


Above = tuple[torch.Tensor | None, ...]


def read_gradient(
    frozen: Frozen,
    streams_TMC: torch.Tensor,
    pre_TM: torch.Tensor,
    given_TM: torch.Tensor | None,
    above: Above,
) -> tuple[Any, torch.Tensor | None]:
    """How gradients of x, pre, post and comb, `above`, reach the streams, and the gradient of a pre that was given."""
    from spyglass.ops.hyper_mix.triton_kernel import project
    from spyglass.ops.hyper_mix.triton_training import Mixed, mix_gradient
    from spyglass.ops.hyper_mix.triton_training import read_gradient as of_read

    rows, streams, width = streams_TMC.shape
    grad_TC, *others = above
    shapes = ((rows, streams), (rows, streams), (rows, streams, streams))
    dpre, dpost, dcomb = (
        torch.zeros(shape, dtype=torch.float32, device=streams_TMC.device) if grad is None else grad.contiguous()
        for grad, shape in zip(others, shapes, strict=True)
    )
    if grad_TC is None:
        grad_TC = streams_TMC.new_zeros(rows, width)
    by_TM = pre_TM if given_TM is None else given_TM.contiguous()
    read = of_read(streams_TMC, by_TM, frozen.weight_C, grad_TC.contiguous(), frozen.eps)
    fn_JE = frozen.fn_JE.contiguous()
    dp_TJ, kappa_T = mix_gradient(
        project(streams_TMC, fn_JE),
        frozen.scale_3,
        frozen.base_J,
        dpre + read.dpre_TM if given_TM is None else dpre,
        dpost,
        dcomb,
        width,
        norm_eps=frozen.norm_eps,
        hc_eps=frozen.hc_eps,
        rounds=frozen.rounds,
    )
    mixed = Mixed(dp_TJ=dp_TJ, kappa_T=kappa_T, fn_JE=fn_JE)
    return (read, mixed), None if given_TM is None else read.dpre_TM


class _WriteRead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z_TC: torch.Tensor,
        shared_TC: torch.Tensor | None,
        streams_TMC: torch.Tensor,
        post_TM: torch.Tensor,
        comb_TMM: torch.Tensor,
        pre_TM: torch.Tensor | None,
        frozen: Frozen,
    ) -> tuple[torch.Tensor, ...]:
        found = triton.hyper_write_read(
            z_TC, shared_TC, streams_TMC, post_TM, comb_TMM, *frozen.weights, pre_TM=pre_TM, **frozen.options
        )
        ctx.save_for_backward(z_TC, shared_TC, streams_TMC, post_TM, comb_TMM, pre_TM, found[0], found[2])
        ctx.frozen = frozen
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from spyglass.ops.hyper_mix.triton_training import Written, streams_gradient

        z_TC, shared_TC, streams_TMC, post_TM, comb_TMM, given_TM, new_TMC, pre_TM = ctx.saved_tensors
        read, dgiven_TM = read_gradient(ctx.frozen, new_TMC, pre_TM, given_TM, grads[1:])
        written = Written(
            z_TC=z_TC.contiguous(),
            shared_TC=None if shared_TC is None else shared_TC.contiguous(),
            streams_TMC=streams_TMC.contiguous(),
            post_TM=post_TM.contiguous(),
            comb_TMM=comb_TMM.contiguous(),
        )
        above_TMC = None if grads[0] is None else grads[0].contiguous()
        dz_TC, dstreams, dpost, dcomb = streams_gradient(new_TMC, above_TMC, read, written)
        dshared_TC = None if shared_TC is None else dz_TC.to(shared_TC.dtype)
        return dz_TC.to(z_TC.dtype), dshared_TC, dstreams, dpost, dcomb, dgiven_TM, None
