"""Where routed experts lie: the most on the GPU, the rest spread over host memory, and what is missing in words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from spyglass.errors import CapacityError
from spyglass.placement import PLACES, ExpertPlacement, StepRates, place_experts, spread

LAYER = 10
LAYERS = dict.fromkeys(range(20), LAYER)


def placed(free: int | None, **options: Any) -> ExpertPlacement:
    given: dict[str, Any] = {"mode": "auto", "others": 7, "beside": 5, "host_free": 10**6, **options}
    return place_experts(LAYERS, free=free, **given)


@pytest.mark.parametrize("free", range(7 + 5 + PLACES * LAYER, 230))
def test_what_is_on_the_gpu_fits_and_one_layer_more_would_not(free: int) -> None:
    found = placed(free)
    kept, hosted = len(LAYERS) - len(found.host), len(found.host)
    assert found.device_bytes == 7 + kept * LAYER and found.host_bytes == hosted * LAYER
    assert found.place_bytes == min(PLACES, hosted) * LAYER
    assert found.device_bytes + found.place_bytes + 5 <= free
    if hosted:
        assert 7 + (kept + 1) * LAYER + min(PLACES, hosted - 1) * LAYER + 5 > free


def test_all_are_on_the_gpu_where_they_fit_or_nobody_knows() -> None:
    assert placed(7 + 5 + 20 * LAYER).host == () and placed(None).host == () and placed(0, mode="gpu").host == ()


def test_steps_get_what_is_left_where_all_experts_are_on_the_host() -> None:
    assert len(placed(7 + PLACES * LAYER).host) == 20


def test_a_stated_limit_holds_even_where_more_would_fit() -> None:
    assert len(placed(10**6, most=59).host) == 15
    assert len(placed(10**6, mode="host").host) == 20 and len(placed(None, most=0).host) == 20


@pytest.mark.parametrize("count", range(21))
def test_layers_in_host_memory_are_spread(count: int) -> None:
    found = spread(range(20), count)
    assert len(set(found)) == count
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_what_is_missing_is_said_with_its_number() -> None:
    with pytest.raises(CapacityError, match=r"0.20 GB are free there: 0.07 GB are missing"):
        place_experts(
            {0: 10**8, 1: 10**8}, mode="auto", others=7 * 10**7, beside=5 * 10**7, free=2 * 10**8, host_free=None
        )
    with pytest.raises(CapacityError, match=r"2 of 2 layers' experts, 4.00 GB, .* 3.00 GB are free there, 1.00 GB are"):
        place_experts({0: 2 * 10**9, 1: 2 * 10**9}, mode="host", others=0, beside=0, free=None, host_free=3 * 10**9)


def test_a_step_waits_for_both_memories() -> None:
    assert StepRates(device=100.0, host=10.0).seconds(50, 20) == 0.5 + 2
