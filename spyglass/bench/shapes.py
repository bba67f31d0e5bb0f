"""A model of tensors without memory, as it would lie on a GPU, and the calls of ops that its steps make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from spyglass.checkpoint.load import LoadReport
from spyglass.config.cache import cache_plans
from spyglass.config.model import ModelConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.rehearsal import engram_rows
from spyglass.layers.build import BuildContext, Loadable
from spyglass.layers.linear import Experts
from spyglass.layers.merged import stack_weights
from spyglass.model import LoadedModel, ModelOptions, VisionLanguageModel
from spyglass.ops.launches import recorded
from spyglass.ops.table import bind_ops
from spyglass.prompt.tokens import TokenKind
from spyglass.quant.packed import Packed, empty_packed
from spyglass.quant.tiles import can_tile
from spyglass.runtime.ahead import gpu_buckets, run_idle
from spyglass.runtime.frame import GPU_ROWS
from spyglass.runtime.step_input import sequence_input
from spyglass.runtime.steps import StepRunner
from spyglass.text.kinds import one_of_each

META = torch.device("meta")
_PAGES = 8


def model_of_shapes(config: ModelConfig) -> LoadedModel:
    """A model in bf16 with packed weights on the device "meta", with Triton's ops where there are some."""
    build = BuildContext(ops=bind_ops("cuda", "bfloat16"), device=META, dtype=torch.bfloat16)
    model = VisionLanguageModel(config, ModelOptions(build=build, numerics="reference"))
    whole: torch.nn.Module = model
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("w1", "w3", "w2"):
                param = model.params[f"{module.name}.0.{name}"]
                stack = empty_packed(param.format, (module.num_experts, *param.shape), META)
                module.put_stack(name, replace(stack, tiled=can_tile(stack)))
        elif isinstance(module, Loadable) and module is not whole:
            for slot in module.slots():
                param = model.params[slot.name]
                slot.put(
                    Packed(param.format, torch.zeros(slot.shape, dtype=torch.int32), None, slot.shape)
                    if param.kind == "index"  # its values are checked
                    else empty_packed(param.format, slot.shape, META)
                )
    stack_weights(model)
    report = LoadReport(counts={}, skipped={}, ignored_files=(), nbytes=0, seconds=0.0)
    return LoadedModel(
        model=model, config=config, device=META, dtype=torch.bfloat16, numerics="reference", report=report
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """A call of an op: arguments as the model gives them, without values."""

    op: str
    args: tuple[Any, ...]
    options: dict[str, Any]


def calls_of(config: ModelConfig, rows: Iterable[int], context: int, generation: int) -> list[OpCall]:
    """What the text layers of a model call in steps of so many rows, on a GPU of this compute capability.

    Up to 256 rows are decoded behind `context` tokens each, more are a prompt.
    """
    loaded = model_of_shapes(config)
    model, text, found = loaded.model, config.text, list[OpCall]()
    kept = one_of_each(model.text.layers, text.layers)
    model.text.layers = torch.nn.ModuleList([model.text.layers[index] for index in kept])
    rows = sorted(rows)
    allocator = CacheAllocator(
        cache_plans(text),
        dtype=loaded.dtype,
        device=META,
        max_sequences=256,
        step_tokens=max(256, *rows),
        max_length=max(context, *rows),
    )
    pages = {key: held.new_empty(_PAGES, *held.shape[1:]) for key, held in allocator.pages.items()}
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=META)
    steps = StepRunner(model, text, allocator.page_rows, META, banned_V, backend="eager")
    widths = {group: table.shape[1] for group, table in allocator.table_rows(np.zeros(0, np.int64)).items()}
    shapes = {shape.rows: shape for shape in reversed(gpu_buckets(steps.frames, 256, context, widths, [False]))}

    def note(op: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        found.append(OpCall(op=op, args=args, options=options))
        return function(*args, **options)

    with torch.inference_mode(), recorded(generation), model.options.build.ops.watched(note):
        for count in rows:
            if count <= GPU_ROWS[-1]:
                run_idle(steps, text, shapes[count], pages, loaded.dtype)
            else:
                tables = {group: np.zeros(1 + count, np.int32) for group in allocator.page_rows}
                kinds = np.full(count, TokenKind.TEXT, np.int8)
                step = sequence_input(np.zeros(count, np.int32), kinds, 0, tables, [count - 1])
                steps.run(step, pages, engram_rows=partial(engram_rows, text, count, loaded.dtype))
    return found
