"""What an engine compiles and captures before it is ready is all that its steps need later."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.rehearsal import captured_bytes, engram_rows, launched_kernels, prompt_step, step_shapes
from spyglass.model import LoadedModel
from spyglass.ops.declare import Backend
from spyglass.ops.launches import recorded
from spyglass.runtime import capture as capture_file
from spyglass.runtime.ahead import capture_idle, run_idle
from spyglass.runtime.capture import Outputs, Run
from spyglass.runtime.frame import Frame
from spyglass.runtime.step_input import StepInput, join_inputs
from spyglass.runtime.steps import StepRunner
from tests.engine_parts import make_engine, make_model
from tests.released_models import released

pytest.importorskip("triton", reason="the development set-up installs Triton")
OPTIONS = EngineConfig(max_step_tokens=4096, max_sequences=64)
LONGEST = {"v4": 1 << 20, "v41": 100_000}  # tokens; scores of a million rows of V4.1 take many launches
META = torch.device("meta")


class FakeGraphs:
    """CUDA graphs without CUDA: capturing runs once, as warming up does, and a replay runs again."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, run: Run) -> Any:
        return FakeGraph(run)

    def clear(self) -> None:
        pass


class FakeGraph:
    def __init__(self, run: Run) -> None:
        self.outputs: Outputs = run()
        self._run = run

    def replay(self) -> Outputs:
        return self._run()


def some_step(rng: np.random.Generator, limit: int, page_rows: dict[str, int]) -> StepInput:
    """Tokens that follow one another in several sequences, or part of a prompt, with an image or without."""
    kind = rng.integers(3)
    if kind == 0:
        starts = rng.integers(0, rng.choice([100, 3000, 50_000, limit - 1]), rng.integers(1, 65))
        return join_inputs([prompt_step(int(start), 1, page_rows) for start in starts])
    tokens = int(rng.integers(1, rng.choice([40, 300, 4097])))
    start = int(rng.integers(0, rng.choice([1, 5000, limit - tokens])))
    return prompt_step(start, tokens, page_rows, images=kind == 2)


def driver(loaded: LoadedModel, backend: Backend, *, stored: bool = False) -> tuple[CacheAllocator, StepRunner]:
    """A cache of 64 sequences without memory, and what runs steps over it."""
    text = loaded.config.text
    allocator = CacheAllocator(
        cache_plans(text, stored=stored),
        dtype=loaded.dtype,
        device=META,
        max_sequences=64,
        step_tokens=4096,
        max_length=text.max_position_embeddings,
    )
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=META)
    return allocator, StepRunner(loaded.model, text, allocator.page_rows, META, banned_V, backend=backend)


def test_rows_of_memory_tables_have_the_dtype_of_activations_whatever_the_cache_holds() -> None:
    """A frame that is captured ahead keeps its buffers; rows of codes in the cache say nothing about them."""
    loaded = released("v41")
    text = loaded.config.text
    allocator, steps = driver(loaded, "eager", stored=True)
    (shape, *_) = step_shapes(steps, allocator, 256, adapters=False)
    seen: list[torch.dtype] = []

    def forward(frame: Frame, *_: object) -> None:
        seen.extend(rows.dtype for rows in frame.batch.engram_rows.values())

    steps.forward = forward  # type: ignore[method-assign, assignment]
    run_idle(steps, text, shape, allocator.pages, loaded.dtype)
    assert seen == [loaded.dtype] * len(text.engram.layers)


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_nothing_is_compiled_or_captured_after_the_start(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_file, "CudaGraphs", FakeGraphs)
    loaded = released(family)
    text = loaded.config.text
    longest = LONGEST[family]
    known = launched_kernels(loaded, replace(OPTIONS, max_length=longest), 90)
    allocator, steps = driver(loaded, "cuda_graph")
    pages = {key: rows.new_empty(4, *rows.shape[1:]) for key, rows in allocator.pages.items()}
    rng = np.random.default_rng(0)
    widths = {group: table.shape[1] for group, table in allocator.table_rows(np.zeros(0, np.int64)).items()}
    with torch.inference_mode(), recorded(90) as launched:
        shapes = step_shapes(steps, allocator, longest, adapters=False)
        for shape in shapes:
            capture_idle(steps, text, shape, pages, loaded.dtype)
        assert steps.capture.captures == len(shapes) and not steps.capture.eager
        replayed = 0
        for _ in range(30):
            step = ringed(some_step(rng, longest, allocator.page_rows), widths)
            rows = len(step.ids_T)
            result = steps.run(step, pages, engram_rows=partial(engram_rows, text, rows, loaded.dtype), argmax=True)
            assert result.hidden_TC.shape == (rows, text.hidden_size)
            loaded.model.logits(result.hidden_TC, result.logit_rows_R)
            few = rows <= 256 and step.kinds_T[0] < 0
            replayed += few
            assert (steps.capture.captures, steps.capture.replays) == (len(shapes), replayed), "captured later"
    assert replayed > 10
    later = {kernel.name for kernel in launched if kernel not in known}
    assert not later, f"compiled later: {later}"


def ringed(step: StepInput, widths: dict[str, int]) -> StepInput:
    """With page tables of rings as wide as an allocator's."""
    rows = len(step.start_S)
    rings = {
        group: np.zeros((rows, width), np.int32) for group, width in widths.items() if not group.startswith("pool")
    }
    return replace(step, table_SP={**step.table_SP, **rings})


def test_captured_steps_are_set_aside_from_what_the_two_largest_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first brings the memory that all share; on a CPU nothing is captured ahead, and nothing taken."""
    left = iter([10_000, 7_000, 6_900])
    model = make_model(seed=1)
    engine = make_engine(model, model.config)
    assert captured_bytes(engine, model, lambda: next(left)) == 0
    monkeypatch.setattr("spyglass.engine.rehearsal.captures_ahead", lambda engine: True)
    shapes = step_shapes(engine.step_runner, engine.allocator, engine.max_length, adapters=True)
    assert captured_bytes(engine, model, lambda: next(left)) == 3_000 + (len(shapes) - 1) * 100
    assert len(shapes) == 2 * 7 * 2, "with and without adapters, 1 to 64 rows, 4,096 tokens in two levels"
