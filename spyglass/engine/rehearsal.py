"""Every kernel that an engine will launch on its GPU, found on tensors without memory and compiled side by side.

One after another Triton took 43 s for the 62 kernels of a short benchmark. What is found here is what the model itself
launches, so no list of kernels has to be kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

import numpy as np
import torch

from spyglass.batch.images import pack_images
from spyglass.config.cache import cache_plans
from spyglass.config.engine import EngineConfig
from spyglass.config.model import TextConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.warm_up import blank, largest_images, step_shapes
from spyglass.model import LoadedModel, VisionLanguageModel
from spyglass.ops.gpu import OF_AN_H200
from spyglass.ops.launches import Kernel, compile_kernels, recorded
from spyglass.prompt.tokens import TokenKind
from spyglass.runtime.frame import GPU_ROWS
from spyglass.runtime.step_input import StepInput, sequence_input
from spyglass.runtime.steps import StepRunner

_META = torch.device("meta")
_PAGES = 8
# Between these numbers of rows, and of tokens before them, other kernels or sizes are chosen
_LENGTHS = (257, 1024, 2048, 4096)
_STARTS = (0, 16_384, 65_536, 600_000)
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
    model, text = loaded.model.on_meta(), loaded.config.text
    allocator = CacheAllocator(
        cache_plans(text),
        dtype=loaded.dtype,
        device=_META,
        max_sequences=options.max_sequences,
        step_tokens=options.max_step_tokens,
        max_length=text.max_position_embeddings,
    )
    pages = {key: rows.new_empty(_PAGES, *rows.shape[1:]) for key, rows in allocator.pages.items()}
    banned_V = torch.zeros(text.vocab_size, dtype=torch.bool, device=_META)
    steps = StepRunner(model, text, allocator.page_rows, _META, banned_V, backend="eager")
    longest = min(options.max_length or text.max_position_embeddings, text.max_position_embeddings)
    with torch.inference_mode(), recorded(generation, processors) as kernels:
        for shape in step_shapes(steps, allocator, longest, adapters=adapters):
            hidden_TC = steps.idle(shape, pages)[0]
            _end(model, hidden_TC, shape.logit_rows, banned_V)
        for start, tokens, pictures in _prompts(options.max_step_tokens, longest, model.vision is not None):
            step = prompt_step(start, tokens, allocator.page_rows, pictures=pictures, slot=int(adapters))
            hidden_TC = steps.run(step, pages, engram_rows=partial(engram_rows, text, tokens, loaded.dtype)).hidden_TC
            _end(model, hidden_TC, 1, banned_V)
        if model.vision is not None:
            for plan in largest_images(model.vision.vision):
                pixels = [blank(plan).pixels]
                model.encode_images(pack_images(pixels, [plan.vit_grid], model.vision.vision, device=_META))
    return kernels


def prompt_step(
    start: int, tokens: int, page_rows: Mapping[str, int], *, pictures: bool = False, slot: int = 0
) -> StepInput:
    """Rows [start, start + tokens) of one prompt, of text or of an image, whose pages are all the first one."""
    ratios = {group: int(group.removeprefix("pool")) for group in page_rows if group.startswith("pool")}
    tables = {
        group: np.zeros(1 + (start + tokens) // (ratios.get(group, 1) * rows), np.int32)
        for group, rows in page_rows.items()
    }
    kinds = np.full(tokens, TokenKind.IMAGE if pictures else TokenKind.TEXT, np.int8)
    return sequence_input(np.zeros(tokens, np.int32), kinds, start, tables, [tokens - 1], slot=slot)


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
    for start, tokens, pictures in product(_STARTS, _LENGTHS, kinds):
        usual = start == _STARTS[0] or (tokens == _LENGTHS[0] and not pictures)
        if usual and tokens <= most and start + tokens <= longest:
            yield start, tokens, pictures
