"""How many kernels a layer launches when it decodes on a GPU: the numbers go down, not up."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spyglass.config.cache import cache_plans
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.layers.linear import Experts
from spyglass.lora.bank import Dropout, ExpertRows, ExpertsBank, make_rows
from spyglass.model import LoadedModel
from spyglass.ops.launches import Kernel, recorded
from spyglass.quant.packed import Packed
from spyglass.runtime.ahead import gpu_buckets, run_idle
from spyglass.runtime.steps import StepRunner
from tests.released_models import released

pytest.importorskip("triton", reason="the development set-up installs Triton")
META = torch.device("meta")
# By compression ratio of a V4 layer; the goal is 16
MOST = {0: 22, 4: 35, 128: 26}
ALONE = {**MOST, 0: 21}  # one row's window is attended by programs that share nothing (ops/tables/90.json)


class OpsOfTorch(TorchDispatchMode):
    """Counts operations of torch that would launch something: not views, nor memory that nothing is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.name() and "detach" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_decoding_layer_launches_no_more_than_it_did(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = ALONE if rows == 1 else MOST
    for stored in (False, True):
        found = launches(released("v4"), rows, False, monkeypatch, stored=stored)
        assert found == {ratio: {count} for ratio, count in most.items()}


@pytest.mark.parametrize("rows", [1, 32])
def test_adapters_of_experts_cost_two_launches_and_no_look_at_the_device(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank product before each end; tensors here have no values, so that whatever asked for one would fail."""
    loaded = released("v4")
    for module in loaded.model.text.modules():
        if isinstance(module, Experts):
            monkeypatch.setattr(module, "adapter", ExpertsBank(loaded.model.options.build, Dropout()), raising=False)
            for slot, rank in ((1, 16), (4, 3)):
                module.adapter.put(slot, {name: rank_rows(stack, rank, slot) for name, stack in module.stacks.items()})
    found = launches(loaded, rows, True, monkeypatch)
    assert found == {ratio: {count + 2} for ratio, count in (ALONE if rows == 1 else MOST).items()}


def rank_rows(stack: Packed, rank: int, slot: int) -> ExpertRows:
    experts, outer, inner = stack.shape
    rows = [torch.empty(experts * rank, width, dtype=torch.bfloat16, device=META) for width in (inner, outer)]
    return ExpertRows(make_rows(rows[0], rows[1], [1.0] * (experts * rank), slot), (rank,) * experts)


def launches(
    loaded: LoadedModel, rows: int, adapters: bool, monkeypatch: pytest.MonkeyPatch, *, stored: bool = False
) -> dict[int, set[int]]:
    """Launches of each layer of a decode step, by compression ratio; `stored`: rows of the cache are codes."""
    model, text = loaded.model, loaded.config.text
    allocator = CacheAllocator(
        cache_plans(text, stored=stored),
        dtype=loaded.dtype,
        device=META,
        max_sequences=64,
        step_tokens=256,
        max_length=1 << 20,
    )
    pages = {key: held.new_empty(4, *held.shape[1:]) for key, held in allocator.pages.items()}
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=META)
    steps = StepRunner(model, text, allocator.page_rows, META, banned_V, backend="eager")
    widths = {group: table.shape[1] for group, table in allocator.table_rows(np.zeros(0, np.int64)).items()}
    shape = next(shape for shape in gpu_buckets(steps.frames, 64, 8192, widths, [adapters]) if shape.rows == rows)
    found: dict[int, set[int]] = {}

    def counted(layer: Any, ratio: int, kernels: Counter[Kernel], torch_ops: OpsOfTorch, *inputs: Any) -> Any:
        before = kernels.total() + torch_ops.count
        out = type(layer).advance(layer, *inputs)
        found.setdefault(ratio, set()).add(kernels.total() + torch_ops.count - before)
        return out

    with torch.inference_mode(), recorded(90) as kernels, OpsOfTorch() as torch_ops:
        for plan, layer in zip(text.layers, model.text.layers, strict=True):
            monkeypatch.setattr(
                layer, "advance", partial(counted, layer, plan.ratio, kernels, torch_ops), raising=False
            )
        run_idle(steps, text, shape, pages, loaded.dtype)
    return found
