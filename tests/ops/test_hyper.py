"""The defining hyper-connection ops: printed values, float64 formulas, and one test per term (spec v4 3.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from spyglass.ops.hyper_collapse.reference import hyper_collapse
from spyglass.ops.hyper_expand.reference import hyper_expand
from spyglass.ops.hyper_head.reference import hyper_head
from spyglass.ops.hyper_mix.reference import hyper_mix
from tests.tolerance import OP_FLOAT32, SPEC_PRINTED, assert_close

SETTINGS: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20}


def mix_of(m: torch.Tensor, scale: list[float], **settings: Any) -> tuple[torch.Tensor, ...]:
    """The mix whose 24 raw numbers are `m`: streams of root mean square 1 and `fn` that copies them out."""
    streams = torch.ones(1, 4, 6)
    fn = (m / 24)[:, None].expand(-1, 24).contiguous()
    return hyper_mix(streams, fn, torch.tensor(scale), torch.zeros(24), **(SETTINGS | {"norm_eps": 0.0} | settings))


def test_the_printed_mix() -> None:
    pre, post, comb = mix_of(torch.arange(24.0).sin(), [1, 0.5, 2])
    assert_close(pre, [[0.500001, 0.698776, 0.712857, 0.535223]], SPEC_PRINTED)
    assert_close(post, [[0.813025, 0.764758, 0.930260, 1.162785]], SPEC_PRINTED)
    rows = [
        [0.562354, 0.327949, 0.082634, 0.027061],
        [0.009254, 0.116016, 0.619195, 0.255535],
        [0.112315, 0.054030, 0.140354, 0.693301],
        [0.316076, 0.502005, 0.157815, 0.024103],
    ]
    assert_close(comb, [rows], SPEC_PRINTED)


def test_the_other_printed_mix() -> None:
    """Spec v41 4.3, printed to eight digits without hc_eps' share of pre."""
    pre, post, _ = mix_of(torch.linspace(-1, 1, 24), [1, 0.5, 2], hc_eps=0.0)
    assert_close(pre, [[0.26894245, 0.28637844, 0.30447412, 0.32319534]], SPEC_PRINTED)
    assert_close(post, [[0.83838612, 0.85962868, 0.88100129, 0.90248483]], SPEC_PRINTED)


def formula(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    rounds: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, size, _ = streams.shape
    x = streams.double().flatten(1).numpy()
    m = x @ fn.double().numpy().T / np.sqrt((x**2).mean(axis=1, keepdims=True) + norm_eps)
    s, b = scale.double().numpy(), base.double().numpy()
    pre = 1 / (1 + np.exp(-(m[:, :size] * s[0] + b[:size]))) + hc_eps
    post = 2 / (1 + np.exp(-(m[:, size : 2 * size] * s[1] + b[size : 2 * size])))
    c = np.exp((m[:, 2 * size :] * s[2] + b[2 * size :]).reshape(tokens, size, size))
    c = c / c.sum(axis=2, keepdims=True) + hc_eps
    c /= c.sum(axis=1, keepdims=True) + hc_eps
    for _ in range(rounds - 1):
        c /= c.sum(axis=2, keepdims=True) + hc_eps
        c /= c.sum(axis=1, keepdims=True) + hc_eps
    return pre, post, c


@pytest.mark.parametrize(("tokens", "size", "width"), [(1, 1, 3), (5, 3, 7), (3, 4, 32), (0, 4, 8)])
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_the_mix_is_its_formula(tokens: int, size: int, width: int, rounds: int) -> None:
    """With big epsilons and small inputs, so that every one of them shows."""
    rows = size * (2 + size)
    streams, fn = 0.1 * torch.randn(tokens, size, width), torch.randn(rows, size * width)
    scale, base = torch.tensor([0.7, 1.3, 0.9]), torch.randn(rows)
    got = hyper_mix(streams, fn, scale, base, norm_eps=0.02, hc_eps=0.05, rounds=rounds)
    for ours, expected in zip(got, formula(streams, fn, scale, base, 0.02, 0.05, rounds), strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours, expected, OP_FLOAT32)


def test_columns_are_normalised_last() -> None:
    """The second index is the target: what flows into a target sums to one."""
    _, _, comb = mix_of(3 * torch.randn(24), [1, 1, 1], rounds=3)
    assert_close(comb.sum(dim=1), np.ones((1, 4)), OP_FLOAT32)
    assert (comb.sum(dim=2) - 1).abs().max() > 1e-4


def test_bf16_streams_are_mixed_in_fp32() -> None:
    streams, fn = torch.randn(4, 3, 16).bfloat16(), torch.randn(15, 48)
    args = fn, torch.rand(3), torch.randn(15)
    for ours, wide in zip(
        hyper_mix(streams, *args, **SETTINGS), hyper_mix(streams.float(), *args, **SETTINGS), strict=True
    ):
        assert torch.equal(ours, wide)


def test_the_last_weights_are_their_formula() -> None:
    streams, fn, scale, base = torch.randn(5, 3, 7) / 9, torch.randn(3, 21), torch.tensor([1.7]), torch.randn(3)
    flat = streams.flatten(1).double().numpy()
    m = flat @ fn.double().numpy().T / np.sqrt((flat**2).mean(axis=1, keepdims=True) + 0.02)
    expected = 1 / (1 + np.exp(-(m * 1.7 + base.numpy()))) + 0.05
    assert_close(hyper_head(streams, fn, scale, base, norm_eps=0.02, hc_eps=0.05), expected, OP_FLOAT32)


def test_collapse_weighs_streams() -> None:
    streams, pre = torch.randn(5, 3, 7), torch.rand(5, 3)
    assert_close(hyper_collapse(streams, pre), np.einsum("tmc,tm->tc", streams, pre), OP_FLOAT32)


def test_expand_mixes_from_the_first_index_to_the_second() -> None:
    streams, z, post, comb = torch.randn(5, 3, 7), torch.randn(5, 7), torch.rand(5, 3), torch.rand(5, 3, 3)
    expected = np.zeros((5, 3, 7))
    for source in range(3):
        for target in range(3):
            expected[:, target] += comb[:, source, target, None].numpy() * streams[:, source].numpy()
    expected += post[:, :, None].numpy() * z[:, None].numpy()
    assert_close(hyper_expand(z, streams, post, comb), expected, OP_FLOAT32)


def test_bf16_sums_are_rounded_once() -> None:
    streams, z = torch.randn(50, 4, 9).bfloat16(), torch.randn(50, 9).bfloat16()
    pre, comb = torch.rand(50, 4), torch.rand(50, 4, 4)
    collapsed = torch.einsum("tm,tmc->tc", pre.double(), streams.double()).bfloat16()
    mixed = (
        torch.einsum("tml,tmc->tlc", comb.double(), streams.double()) + pre.double()[:, :, None] * z.double()[:, None]
    )
    assert (hyper_collapse(streams, pre) == collapsed).float().mean() > 0.995
    assert (hyper_expand(z, streams, pre, comb) == mixed.bfloat16()).float().mean() > 0.995
