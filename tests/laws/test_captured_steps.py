"""Decode steps from captured graphs are the steps themselves, bit for bit, in both families and with adapters."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from spyglass.lora.pool import AdapterPool
from spyglass.runtime.capture import Capture
from tests.adapter_parts import random_adapter, shapes_of
from tests.captured import assert_same, assert_same_pages, decode, op_by_op
from tests.small_models import ops_of, small_config, small_model
from tests.small_v41 import small_store, small_v41_config, small_v41_model

Dtype = Literal["float32", "bfloat16"]


def make(family: str, dtype: Dtype, topk: int) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {
        "packed": True,
        "expand": False,
        "dtype": getattr(torch, dtype),
        "numerics": "reference",
        "ops": ops_of(("cpu", "auto"), dtype),
    }
    if family == "v4":
        return small_model(seed=5, config=small_config(index_topk=topk), **options), {}
    model = small_v41_model(seed=5, **options)
    return model, {"store": small_store(small_v41_config())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["v4", "v4 rows chosen", "v4 adapters", "v41", "v41 adapters"])
def test_captured_steps_equal_steps_op_by_op(case: str, dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = make(case.split()[0], dtype, 5 if "chosen" in case else 48)
    if "adapters" in case:
        pool = AdapterPool(model)
        shapes = shapes_of(model)
        one = pool.attach(
            "one", random_adapter(shapes, ["attention", "experts", "shared", "compressor"], rank=3, seed=1)
        )
        two = pool.attach("two", random_adapter(shapes, ["attention", "shared"], rank=2, seed=2))
        options["adapter_ids"] = (0, one.adapter_id, two.adapter_id, one.adapter_id, 0)
    got, memory, runner = decode(model, **options)
    assert runner.capture.replays >= 8 and not runner.capture.eager, runner.capture.eager
    monkeypatch.setattr(Capture, "run", op_by_op)
    expected, plain, _ = decode(model, **options)
    assert_same(got, expected)
    assert_same_pages(memory, plain)


def test_what_a_step_gave_stays_as_it_is_in_later_steps() -> None:
    model, _ = make("v4", "float32", 48)
    results, _, _ = decode(model)
    again, _, _ = decode(model)
    assert_same(results, again)


def test_other_adapters_are_another_version() -> None:
    model, _ = make("v4", "float32", 48)
    before, _, _ = decode(model)
    version = model.weights_version
    pool = AdapterPool(model)
    use = pool.attach("one", random_adapter(shapes_of(model), ["attention"], rank=3, seed=1))
    assert model.weights_version != version
    version = model.weights_version
    pool.detach("one")
    assert model.weights_version != version and use.adapter_id
    assert_same(decode(model)[0], before)
