"""Routed experts in host memory give what those beside the rest of the model give, bit for bit on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass import LLM, AdapterError, ConfigError, SamplingParams
from spyglass.lora.pool import AdapterPool
from spyglass.runtime.capture import Capture
from tests.adapter_parts import random_adapter, shapes_of
from tests.captured import assert_same, assert_same_pages, decode, op_by_op
from tests.hosted_parts import HOSTED, make


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "bf16"])
@pytest.mark.parametrize("family", ["v4", "v41"])
def test_hosted_experts_equal_those_on_the_device(family: str, packed: bool) -> None:
    model, options = make(family, "cpu", packed=packed)
    hosted, _ = make(family, "cpu", packed=packed, host=HOSTED)
    expected, plain, _ = decode(model, **options)
    got, memory, runner = decode(hosted, **options)
    assert runner.capture.replays >= 8 and not runner.capture.eager, runner.capture.eager
    assert_same(got, expected)
    assert_same_pages(memory, plain)


def test_captured_steps_of_hosted_experts_equal_steps_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted, options = make("v4", "cpu", host=HOSTED)
    got, memory, _ = decode(hosted, **options)
    monkeypatch.setattr(Capture, "run", op_by_op)
    expected, plain, _ = decode(hosted, **options)
    assert_same(got, expected)
    assert_same_pages(memory, plain)


def test_adapters_of_hosted_experts_equal_those_on_the_device() -> None:
    results: list[Any] = []
    for host in ((), HOSTED):
        model, _ = make("v4", "cpu", host=host)
        pool = AdapterPool(model)
        parts = ["attention", "experts", "shared"]
        one = pool.attach("one", random_adapter(shapes_of(model), parts, rank=3, seed=1))
        two = pool.attach("two", random_adapter(shapes_of(model), ["experts"], rank=2, seed=2))
        results.append(decode(model, adapter_ids=(0, one.adapter_id, two.adapter_id, one.adapter_id, 0)))
    assert_same(results[1][0], results[0][0])
    assert_same_pages(results[1][1], results[0][1])


def test_hosted_experts_by_reference_equal_the_reference() -> None:
    model, options = make("v4", "cpu", ops="reference")
    hosted, _ = make("v4", "cpu", ops="reference", host=HOSTED)
    assert_same(decode(hosted, **options, steps=2)[0], decode(model, **options, steps=2)[0])


def test_a_gradient_is_refused_in_words() -> None:
    hosted, _ = make("v4", "cpu", host=HOSTED)
    experts = hosted.text.layers[min(HOSTED)].ffn.experts
    x_TC = torch.zeros(1, hosted.config.text.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(Exception, match="experts in host memory has no backward"):
        experts(x_TC, torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2))


def test_a_model_with_its_experts_in_host_memory_answers_as_without() -> None:
    prompt, params = list(range(3, 90)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers, logits = [], []
    for where in ("gpu", "host"):
        llm = LLM("tiny", load="dummy", device="cpu", images=0, max_length=256, experts=where)
        answers.append(llm.generate([prompt, prompt[:20]], params))
        logits.append(llm.logits(prompt))
    assert [one.token_ids for one in answers[1]] == [one.token_ids for one in answers[0]]
    assert torch.equal(*logits)
    with pytest.raises(AdapterError, match="experts in host memory have no gradient"):
        llm.new_adapter(["attention"], rank=2, alpha=2)


def test_a_divided_model_with_experts_in_host_memory_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="experts is 'host' and tensor_parallel_size 2"):
        LLM("tiny", load="dummy", device="cpu", experts="host", tensor_parallel_size=2)


@pytest.mark.parametrize("text", ["cpu", "auto:", "auto:x", "host:3", ""])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected gpu, host, auto or auto:GB"):
        LLM("tiny", load="dummy", device="cpu", experts=text)
