"""Captured decode steps on a GPU: the same frames op by op give the same bits, in every bucket and at every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass.lora.pool import AdapterPool
from spyglass.ops.table import bind_ops
from spyglass.runtime.capture import Capture
from tests import captured
from tests.adapter_parts import random_adapter, shapes_of
from tests.captured import assert_same, assert_same_pages, decode, op_by_op
from tests.small_models import small_config, small_model
from tests.small_v41 import small_store, small_v41_config, small_v41_model

pytestmark = pytest.mark.gpu


def make(family: str, topk: int = 48) -> tuple[Any, dict[str, Any]]:
    ops = bind_ops("cuda", "bfloat16")
    if ops.capture_backend != "cuda_graph":
        pytest.skip(f"these ops cannot be captured: {dict(ops.chosen)}")
    options: dict[str, Any] = {
        "packed": True, "expand": False, "dtype": torch.bfloat16, "numerics": "reference", "ops": ops, "device": "cuda",
    }  # fmt: skip
    if family == "v4":
        return small_model(seed=5, config=small_config(index_topk=topk), **options), {}
    return small_v41_model(seed=5, **options), {"store": small_store(small_v41_config())}


@pytest.mark.parametrize("case", ["v4", "v4 rows chosen", "v41"])
def test_captured_steps_equal_steps_op_by_op(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = make(case.split()[0], 5 if "chosen" in case else 48)
    got, memory, runner = decode(model, **options)
    # the first step of a bucket is captured, every other one is a replay
    assert runner.capture.captures + runner.capture.replays >= captured.STEPS, runner.capture.eager
    assert not runner.capture.eager, runner.capture.eager
    monkeypatch.setattr(Capture, "run", op_by_op)
    expected, plain, _ = decode(model, **options)
    assert_same(got, expected)
    assert_same_pages(memory, plain)


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 7, 8, 13, 16, 24, 33, 64])
def test_every_bucket_of_rows(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts short and long enough to move from one bucket of lengths into the next."""
    model, options = make("v4")
    lengths = tuple([2046, 3, 129, 40][n % 4] if n < 4 else 1 + n for n in range(sequences))
    monkeypatch.setattr(captured, "LENGTHS", lengths)
    got, memory, runner = decode(model, **options, adapter_ids=(0,) * sequences, steps=6)
    assert not runner.capture.eager, runner.capture.eager
    monkeypatch.setattr(Capture, "run", op_by_op)
    expected, plain, _ = decode(model, **options, adapter_ids=(0,) * sequences, steps=6)
    assert_same(got, expected)
    assert_same_pages(memory, plain)


def test_steps_with_adapters_of_any_group_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make("v4")
    pool = AdapterPool(model)
    use = pool.attach("one", random_adapter(shapes_of(model), ["attention", "shared", "experts"], rank=3, seed=1))
    adapter_ids = (0, use.adapter_id, 0, use.adapter_id, 0)
    got, memory, runner = decode(model, adapter_ids=adapter_ids)
    assert runner.capture.captures + runner.capture.replays >= captured.STEPS, runner.capture.eager
    assert not runner.capture.eager, runner.capture.eager
    monkeypatch.setattr(Capture, "run", op_by_op)
    expected, plain, _ = decode(model, adapter_ids=adapter_ids)
    assert_same(got, expected)
    assert_same_pages(memory, plain)


def test_graphs_share_memory() -> None:
    """Each graph more costs little beside what the first took."""
    model, _ = make("v4")
    _, _, runner = decode(model)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    decode(model)
    assert len(runner.capture) >= 2
    assert torch.cuda.memory_reserved() < 2 * reserved
