"""Decoding through captured graphs beside the same frames run op by op, for laws on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from spyglass.engram.store import EngramStore
from spyglass.runtime.capture import Capture
from spyglass.runtime.step_input import join_inputs, sequence_input
from spyglass.runtime.steps import StepResult, StepRunner
from tests.driver import Memory
from tests.engram_values import rows_of
from tests.small_models import random_text

LENGTHS = (3, 11, 126, 40, 2)  # groups of 4 and of 128 close at different times
STEPS = 24


def op_by_op(self: Capture, key: Any, run: Callable[[], Any], **_: Any) -> Any:
    """In place of `Capture.run`: the same frames, and nothing is captured."""
    return run()


def decode(
    model: Any,
    *,
    adapter_ids: Sequence[int] = (0,) * len(LENGTHS),
    store: EngramStore | None = None,
    steps: int = STEPS,
) -> tuple[list[StepResult], Memory, StepRunner]:
    """Prompts of LENGTHS one by one, then tokens of all of them together; fewer sequences towards the end."""
    build, text = model.options.build, model.config.text
    memory = Memory(
        text=text, dtype=build.dtype, sequences=len(LENGTHS), length=max(LENGTHS) + steps, device=build.device
    )
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=build.device)
    banned_V[7] = True
    runner = StepRunner(model, text, memory.page_rows, build.device, banned_V)
    ids = [random_text(length + steps, seed=number).astype(np.int32) for number, length in enumerate(LENGTHS)]

    def run(spans: Sequence[tuple[int, int, int]]) -> StepResult:
        parts = [
            sequence_input(
                ids[n][start:stop],
                np.full(stop - start, -1, np.int8),
                start,
                memory.tables[n],
                [stop - start - 1],
                adapter_id=adapter_ids[n],
            )
            for n, start, stop in spans
        ]
        rows = None if store is None else (lambda: _engram_rows(store, ids, spans, build))
        with torch.inference_mode():
            return runner.run(join_inputs(parts), memory.pages, engram_rows=rows, argmax=True)

    out = [run([(n, 0, length)]) for n, length in enumerate(LENGTHS)]
    for step in range(steps):
        going = min(len(LENGTHS), 99 if step < steps - 8 else 3 if step < steps - 4 else 1)
        out.append(run([(n, LENGTHS[n] + step, LENGTHS[n] + step + 1) for n in range(going)]))
    return out, memory, runner


def assert_same(got: Sequence[StepResult], expected: Sequence[StepResult]) -> None:
    """Bit for bit."""
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(mine.hidden_TC, theirs.hidden_TC), f"step {number}"
        assert (mine.argmax is None) == (theirs.argmax is None)
        for a, b in zip(mine.argmax or (), theirs.argmax or (), strict=True):
            assert torch.equal(a, b), f"step {number}"


def assert_same_pages(mine: Memory, theirs: Memory) -> None:
    """Bit for bit, pages that were never written included."""
    for name, pages in mine.pages.items():
        assert torch.equal(pages.nan_to_num(nan=7e7), theirs.pages[name].nan_to_num(nan=7e7)), name


def _engram_rows(
    store: EngramStore, ids: Sequence[Any], spans: Sequence[tuple[int, int, int]], build: Any
) -> dict[int, torch.Tensor]:
    found: dict[int, list[torch.Tensor]] = {}
    for n, start, stop in spans:
        before = np.full(store.config.lookback, -1, np.int32)
        known = ids[n][max(0, start - len(before)) : start][::-1]
        before[: len(known)] = known
        for layer, rows in rows_of(store, ids[n][start:stop], np.full(stop - start, -1, np.int8), before).items():
            found.setdefault(layer, []).append(torch.from_numpy(rows).to(build.device, build.dtype))
    return {layer: torch.cat(rows) for layer, rows in found.items()}
