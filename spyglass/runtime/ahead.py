"""Steps that a GPU captures before the first of them comes: which there are, and frames of padding to try them on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

import torch

from spyglass.config.model import TextConfig
from spyglass.runtime.capture import Outputs
from spyglass.runtime.frame import GPU_ROWS, Frame, Frames, FrameShape, Pages
from spyglass.runtime.steps import StepRunner


def gpu_buckets(
    frames: Frames, rows: int, tokens: int, table_widths: Mapping[str, int], adapters: Collection[bool]
) -> list[FrameShape]:
    """The buckets of all steps of at most `rows` rows of sequences up to `tokens` tokens, the largest first.

    `table_widths` of the page tables by group; `adapters`: whether rows may have some.
    """
    sizes = [size for number, size in enumerate(GPU_ROWS) if number == 0 or GPU_ROWS[number - 1] < rows]
    return [
        frames.gpu_shape(size, level, table_widths, some)
        for level in reversed(frames.levels(tokens))
        for size in reversed(sizes)
        for some in adapters
    ]


def run_idle(steps: StepRunner, text: TextConfig, shape: FrameShape, pages: Pages, dtype: torch.dtype) -> Outputs:
    """A step of padding rows, op by op: it changes nothing. `dtype` of activations: rows of memory tables have it."""
    return steps.forward(_padding(steps, text, shape, pages, dtype), None, False)


def capture_idle(steps: StepRunner, text: TextConfig, shape: FrameShape, pages: Pages, dtype: torch.dtype) -> None:
    """Capture steps of this shape for a GPU before the first one comes."""
    steps.use(pages)
    frame = _padding(steps, text, shape, pages, dtype)
    steps.capture.prepare((frame, False, torch.get_num_threads()), partial(steps.forward, frame, None, False))


def _padding(steps: StepRunner, text: TextConfig, shape: FrameShape, pages: Pages, dtype: torch.dtype) -> Frame:
    frame = steps.frames.padding(shape, pages)
    if text.engram is not None:
        none = torch.empty(0, text.engram.row_width, dtype=dtype, device=frame.batch.ids_T.device)
        frame.put_engram(dict.fromkeys(text.engram.layers, none))
    return frame
