"""Once a server is ready its GPU neither compiles anything nor takes memory from the driver, whatever is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from spyglass import LLM, SamplingParams
from spyglass.engine.rehearsal import capture_steps

pytestmark = pytest.mark.gpu
MODEL = "spyglass-tiny-v4"
LENGTHS = (1, 2, 7, 8, 9, 33, 64, 65, 120, 250, 257, 300, 511, 700, 900)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    ready = LLM(MODEL, device="cuda", max_sequences=16, max_length=1024, max_step_tokens=1024)
    capture_steps(ready.engine, ready.loaded.model)
    yield ready


def ask(llm: LLM, count: int, seed: int) -> None:
    """Prompts of many lengths at once; some are drawn from, with limits and penalties."""
    numbers = np.random.default_rng(seed)
    lengths = numbers.choice(LENGTHS, count)
    prompts = [numbers.integers(10, 400, length).tolist() for length in lengths]
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, seed=seed, temperature=0.8, top_p=0.9, presence_penalty=0.5)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    outputs = llm.generate(prompts, [drawn if number % 3 == 2 else greedy for number in range(count)])
    assert all(len(output.token_ids) == 12 for output in outputs)


def test_nothing_is_compiled_once_the_model_is_ready(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []

    def note(*, metadata: Mapping[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:  # else its file was there, and was loaded when the kernel was first launched
            compiled.append(metadata["name"])

    monkeypatch.setattr(knobs.compilation, "listener", note)
    for seed, count in enumerate((1, 3, 8, 16)):
        ask(llm, count, seed)
    assert not compiled


def test_no_memory_is_taken_from_the_driver_once_the_model_is_ready(llm: LLM) -> None:
    ask(llm, 16, 100)  # the allocator has met all sizes
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for seed in range(101, 106):
        ask(llm, 16, seed)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
