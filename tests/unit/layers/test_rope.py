"""Rotary frequencies: values printed in the specification, and every term of YaRN (spec v4 4.3)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from spyglass.config.model import YarnScaling
from spyglass.layers.rope import Rope, rope_frequencies
from tests.tolerance import OP_FLOAT32, SPEC_PRINTED, assert_close

RELEASED = YarnScaling(factor=16, original_max_position=65536, beta_fast=32, beta_slow=1)


def test_plain_frequencies() -> None:
    assert_close(rope_frequencies(10000, 64, None), [10000.0 ** (-2 * i / 64) for i in range(32)], OP_FLOAT32)


def test_printed_frequencies() -> None:
    f = rope_frequencies(160000, 64, RELEASED)
    printed = {1: 0.68765604, 15: 0.00363554, 16: 0.00226562, 20: 2.969778e-4, 24: 1.953125e-5, 25: 5.372312e-6}
    for index, value in (printed | {31: 5.680529e-7}).items():
        assert float(f[index]) == pytest.approx(value, rel=5e-6)


def test_printed_ratios_to_the_plain_frequencies() -> None:
    ratio = rope_frequencies(160000, 64, RELEASED).double() / rope_frequencies(160000, 64, None).double()
    ramp = [0.90625, 0.8125, 0.71875, 0.625, 0.53125, 0.4375, 0.34375, 0.25, 0.15625]
    assert_close(ratio, [1.0] * 16 + ramp + [0.0625] * 7, SPEC_PRINTED)


def test_every_yarn_number_matters() -> None:
    f = rope_frequencies(160000, 64, RELEASED)
    for change in ({"factor": 8.0}, {"original_max_position": 4096}, {"beta_fast": 8.0}, {"beta_slow": 4.0}):
        assert not torch.equal(rope_frequencies(160000, 64, dataclasses.replace(RELEASED, **change)), f), change


def test_equal_borders_do_not_divide_by_zero() -> None:
    """Pairs below the border keep their frequency, those above are slowed."""
    scaling = YarnScaling(factor=4, original_max_position=6, beta_fast=2, beta_slow=2)
    ratio = rope_frequencies(100, 8, scaling) / rope_frequencies(100, 8, None)
    assert torch.isfinite(ratio).all()
    assert set(ratio.tolist()) <= {1.0, 0.25}


def test_angles_are_fp32_products() -> None:
    """At position 10^6 a float64 angle differs visibly in the fast pairs."""
    rope = Rope(10000.0, 64, None, torch.device("cpu"))
    position = torch.tensor([0, 1, 1_000_003], dtype=torch.int32)
    cos, sin = rope.tables(position)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (3, 32)
    angle = (position.numpy().astype(np.float32)[:, None] * rope.frequency_R.numpy()).astype(np.float32)
    assert_close(cos, np.cos(angle.astype(np.float64)), SPEC_PRINTED)
    assert_close(sin, np.sin(angle.astype(np.float64)), SPEC_PRINTED)
    exact = np.cos(1_000_003 * rope.frequency_R.double().numpy())
    assert np.abs(cos[2].numpy() - exact).max() > 1e-3
