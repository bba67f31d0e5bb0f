"""Drawing on a GPU gives the tokens that the host draws from the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.engine.request import SamplingParams
from spyglass.engine.sampler import SampledTokens, SampleInput, UsedTokens, sample

pytestmark = pytest.mark.gpu
PARAMS = [
    SamplingParams(temperature=0, logprobs=4),
    SamplingParams(),
    SamplingParams(temperature=0.3, top_k=50),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=1000, top_p=0.95, min_p=0.001, temperature=1.5),
    SamplingParams(min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
]


def drawn(logits: torch.Tensor, position: int) -> SampledTokens:
    rows = len(PARAMS)
    used = UsedTokens(ids_J=np.arange(0, 3000, 3), counts_J=np.arange(1000, dtype=np.float32) % 4)
    step = SampleInput(
        params=PARAMS,
        seed_S=np.arange(rows, dtype=np.uint64),
        position_S=np.full(rows, position, np.uint64),
        used=[used if params.penalised else None for params in PARAMS],
    )
    return sample(logits.clone(), step, torch.tensor([0, 2, 129264], device=logits.device)).read()


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_the_gpu_draws_what_the_host_draws(spread: float) -> None:
    logits = torch.randn(len(PARAMS), 129280, generator=torch.Generator().manual_seed(0)) * spread
    moved = 0  # where the random number falls within rounding of the border between two tokens
    for position in range(20):
        here, there = drawn(logits, position), drawn(logits.cuda(), position)
        assert here.ids[0] == there.ids[0]
        moved += sum(a != b for a, b in zip(here.ids, there.ids, strict=True))
        assert here.is_finite == there.is_finite
        one, other = here.logprobs[0], there.logprobs[0]
        assert one is not None and other is not None
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert moved <= 2


def test_sampling_waits_for_nothing_on_the_gpu() -> None:
    """torch raises where the host would wait; what is read back has been on its way since."""
    logits = torch.randn(len(PARAMS), 129280, device="cuda")
    step = SampleInput(
        params=PARAMS,
        seed_S=[1] * len(PARAMS),
        position_S=[2] * len(PARAMS),
        used=[UsedTokens(ids_J=np.arange(9), counts_J=np.ones(9, np.float32)) if p.penalised else None for p in PARAMS],
        grammar_rows=[1, 3],
        allowed=torch.rand(2, 129280) < 0.5,
    )
    banned = torch.tensor([0, 2], device="cuda")
    sample(logits.clone(), step, banned).read()  # memory and kernels are there from now on
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = sample(logits, step, banned)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(pending.read().ids) == len(PARAMS)
