"""Every kernel that an engine will launch on its GPU, compiled side by side, and every step of few rows, captured.

One after another Triton took 43 s for the 62 kernels of a short benchmark. What is found here is what the model itself
launches on tensors without memory, so no list of kernels has to be kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import nn

from spyglass.batch.images import pack_images
from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import TextConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.engine import Engine
from spyglass.engine.lead import LeadSteps
from spyglass.engine.warm_up import blank, largest_images
from spyglass.errors import CapacityError
from spyglass.model import LoadedModel, VisionLanguageModel
from spyglass.ops.launches import OF_AN_H200, Kernel, compile_kernels, recorded
from spyglass.prompt.tokens import TokenKind
from spyglass.runtime.ahead import capture_idle, gpu_buckets, run_idle
from spyglass.runtime.frame import GPU_ROWS, FrameShape
from spyglass.runtime.step_input import StepInput, sequence_input
from spyglass.runtime.steps import StepRunner
from spyglass.text.kinds import one_of_each, without_memory

_META = torch.device("meta")
_PAGES = 8
# Between these numbers of rows, and of tokens before them, other kernels or sizes are chosen
_LENGTHS = (257, 1024, 2048, 4096)
_STARTS = (0, 4_096, 16_384, 65_536, 150_000, 300_000, 600_000)
_STARTS_OF_FEW = (0, 16_384)
_LOG = logging.getLogger(__name__)


def compile_ahead(loaded: LoadedModel, options: EngineConfig, *, adapters: bool = False) -> None:
    """Compile what an engine of this model will launch on the GPU it lies on; nothing to do without Triton or a GPU."""
    if loaded.device.type != "cuda" or "triton" not in loaded.model.options.build.ops.chosen.values():
        return
    started, gpu = time.perf_counter(), torch.cuda.get_device_properties(loaded.device)
    generation = 10 * gpu.major + gpu.minor
    try:
        kernels = launched_kernels(loaded, options, generation, gpu.multi_processor_count, adapters)
        compile_kernels(kernels, generation)
    except Exception:  # all of it would be compiled later as well: no reason to refuse a model
        _LOG.warning("kernels are compiled when they are first launched: looking ahead failed", exc_info=True)
        return
    _LOG.info("%d kernels are compiled after %.1f s", len(kernels), time.perf_counter() - started)


def launched_kernels(
    loaded: LoadedModel, options: EngineConfig, generation: int, processors: int = OF_AN_H200, adapters: bool = False
) -> Counter[Kernel]:
    """What decode steps of every bucket, and prompts of lengths between which other kernels are chosen, launch."""
    model, text = _on_meta(loaded.model), loaded.config.text
    allocator = CacheAllocator(
        cache_plans(text, stored=loaded.stores_rows),
        dtype=loaded.dtype,
        device=_META,
        max_sequences=options.max_sequences,
        step_tokens=options.max_step_tokens,
        max_length=text.max_position_embeddings,
    )
    pages = {key: rows.new_empty(_PAGES, *rows.shape[1:]) for key, rows in allocator.pages.items()}
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=_META)
    steps = StepRunner(model, text, allocator.page_rows, _META, banned_V, backend="eager")
    longest = options.context_length(text.max_position_embeddings)
    with torch.inference_mode(), recorded(generation, processors) as kernels:
        for shape in step_shapes(steps, allocator, longest, adapters=adapters):
            hidden_TC = run_idle(steps, text, shape, pages, loaded.dtype)[0]
            _end(model, hidden_TC, shape.logit_rows, banned_V)
        for start, tokens, images in _prompts(options.max_step_tokens, longest, model.vision is not None):
            step = prompt_step(start, tokens, allocator.page_rows, images=images, adapter_id=int(adapters))
            hidden_TC = steps.run(step, pages, engram_rows=partial(engram_rows, text, tokens, loaded.dtype)).hidden_TC
            _end(model, hidden_TC, 1, banned_V)
        if model.vision is not None:
            for plan in largest_images(model.vision.vision):
                pixels = [blank(plan).pixels]
                model.encode_images(pack_images(pixels, [plan.vit_grid], model.vision.vision, device=_META))
    return kernels


def step_shapes(steps: StepRunner, allocator: CacheAllocator, tokens: int, *, adapters: bool) -> list[FrameShape]:
    """What a GPU captures of the steps of sequences up to `tokens` tokens, the largest first."""
    widths = {group: table.shape[1] for group, table in allocator.table_rows(np.zeros(0, np.int64)).items()}
    return gpu_buckets(steps.frames, allocator.step_tokens, tokens, widths, (True, False) if adapters else (False,))


def captures_ahead(engine: Engine) -> bool:
    """Whether steps can be captured before they are needed; ranks of a divided model capture theirs together."""
    steps = engine.step_runner
    return steps.capture.backend == "cuda_graph" and not isinstance(steps, LeadSteps)


def capture_steps(
    engine: Engine, model: VisionLanguageModel, *, adapters: bool = False, most: int | None = None
) -> None:
    """Capture for a GPU all steps of few rows, and the tower; nothing runs and nothing changes.

    `adapters`: steps with adapters too. `most`: only so many of the largest steps, and no tower.

    Raises:
        CapacityError: the device has no memory for the graphs.
    """
    if not captures_ahead(engine):
        return
    started, steps, pages = time.perf_counter(), engine.step_runner, engine.allocator.pages
    shapes = step_shapes(steps, engine.allocator, engine.max_length, adapters=adapters)[:most]
    try:
        with torch.inference_mode():
            for shape in shapes:
                capture_idle(steps, model.config.text, shape, pages, model.options.build.dtype)
        if most is None and model.vision_graphs is not None:
            model.vision_graphs.prepare()
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the GPU has no memory left for {len(shapes)} captured steps; lower cache_bytes or max_length"
        ) from error
    _LOG.info("captured %d steps in %.1f s", steps.capture.captures, time.perf_counter() - started)


def captured_bytes(engine: Engine, model: VisionLanguageModel, free: Callable[[], int]) -> int:
    """What all captured steps of an engine will take, from what the two largest take of the `free` memory."""
    if not captures_ahead(engine):
        return 0
    count, left = len(step_shapes(engine.step_runner, engine.allocator, engine.max_length, adapters=True)), [free()]
    for number in (1, 2):
        capture_steps(engine, model, adapters=True, most=number)
        left.append(free())
    return left[0] - left[1] + (count - 1) * max(0, left[1] - left[2])


def prompt_step(
    start: int, tokens: int, page_rows: Mapping[str, int], *, images: bool = False, adapter_id: int = 0
) -> StepInput:
    """Rows [start, start + tokens) of one prompt, of text or of an image, whose pages are all the first one."""
    ratios = {group: int(group.removeprefix("pool")) for group in page_rows if group.startswith("pool")}
    tables = {
        group: np.zeros(1 + (start + tokens) // (ratios.get(group, 1) * rows), np.int32)
        for group, rows in page_rows.items()
    }
    kinds = np.full(tokens, TokenKind.IMAGE if images else TokenKind.TEXT, np.int8)
    return sequence_input(np.zeros(tokens, np.int32), kinds, start, tables, [tokens - 1], adapter_id=adapter_id)


def _on_meta(model: VisionLanguageModel) -> VisionLanguageModel:
    """A copy without memory, and with one layer of each kind."""
    copied = without_memory(model, model.options.build, model.vision_graphs)
    kept = one_of_each(model.text.layers, model.config.text.layers)
    copied.text.layers = nn.ModuleList([copied.text.layers[index] for index in kept])
    return copied


def _end(model: VisionLanguageModel, hidden_TC: torch.Tensor, rows: int, banned_V: torch.Tensor) -> None:
    rows_R = torch.zeros(rows, dtype=torch.int64, device=_META)
    model.logits(hidden_TC, rows_R)
    model.argmax(hidden_TC, rows_R, banned_V)


def engram_rows(text: TextConfig, tokens: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    """Rows of the memory tables for so many tokens, without memory."""
    if text.engram is None:
        return {}
    row = torch.empty(tokens, text.engram.row_width, dtype=dtype, device=_META)
    return dict.fromkeys(text.engram.layers, row)


def _prompts(most: int, longest: int, sees: bool) -> Iterator[tuple[int, int, bool]]:
    """Start, number of tokens and whether there are images of steps that no graph holds."""
    kinds = (False, True) if sees else (False,)
    yield from product(_STARTS_OF_FEW, GPU_ROWS, kinds[1:])  # text of so few rows runs in a graph
    for start, tokens, images in product(_STARTS, _LENGTHS, kinds):
        usual = start == _STARTS[0] or (tokens in _LENGTHS[:2] and not images)
        if usual and tokens <= most and start + tokens <= longest:
            yield start, tokens, images
