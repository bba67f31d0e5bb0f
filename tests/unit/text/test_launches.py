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
from spyglass.ops.launches import Kernel, recorded
from spyglass.runtime.ahead import gpu_buckets, run_idle
from spyglass.runtime.steps import StepRunner
from tests.released_models import released

pytest.importorskip("triton", reason="the development set-up installs Triton")
META = torch.device("meta")
# By compression ratio of a V4 layer; the goal is 16
MOST = {0: 22, 4: 35, 128: 26}


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
    loaded = released("v4")
    model, text = loaded.model, loaded.config.text
    allocator = CacheAllocator(
        cache_plans(text), dtype=loaded.dtype, device=META, max_sequences=64, step_tokens=256, max_length=1 << 20
    )
    pages = {key: held.new_empty(4, *held.shape[1:]) for key, held in allocator.pages.items()}
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=META)
    steps = StepRunner(model, text, allocator.page_rows, META, banned_V, backend="eager")
    widths = {group: table.shape[1] for group, table in allocator.table_rows(np.zeros(0, np.int64)).items()}
    shape = next(shape for shape in gpu_buckets(steps.frames, 64, 8192, widths, [False]) if shape.rows == rows)
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
        run_idle(steps, text, shape, pages)
    assert found == {ratio: {count} for ratio, count in MOST.items()}
