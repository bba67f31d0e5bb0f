"""From chats to one packed training step: whole, fresh sequences side by side, each counted from its own position 0.

Alignment to groups of 4 and 128 tokens, image spans and windows are relative to a sequence's own start, so packing
never shifts them (spec v4 10). All index arithmetic is the serving engine's (`runtime.frame`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.images import pack_images
from spyglass.batch.rows import new_rows
from spyglass.batch.types import Batch, CacheView, ImageBatch
from spyglass.config.cache import cache_plans
from spyglass.config.model import ModelConfig, TextConfig
from spyglass.engram.feed import EngramFeed
from spyglass.prompt.tokens import Prompt
from spyglass.runtime.frame import Frames
from spyglass.runtime.step_input import StepInput, join_inputs, sequence_input

Tables = dict[str, NDArray[np.int32]]
_FOR_LATER_STEPS = ("state", "index_state")  # a training step is the only one of its sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A whole chat as tokens; `learn_T` bool: the tokens to be predicted. The first token and images cannot be."""

    prompt: Prompt
    learn_T: NDArray[np.bool_]

    @property
    def rows(self) -> NDArray[np.int64]:
        """Positions whose next token is to be predicted."""
        ids_T, learn_T = self.prompt.ids_T, self.learn_T
        assert learn_T.shape == ids_T.shape, (learn_T.shape, ids_T.shape)
        assert not learn_T[:1].any() and (ids_T[learn_T] >= 0).all(), "the first token or an image cannot be a target"
        return np.flatnonzero(learn_T[1:])

    @property
    def targets(self) -> NDArray[np.int64]:
        """The tokens after `rows`."""
        return self.prompt.ids_T[self.rows + 1].astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """What one forward pass takes; `targets_R` int64 are the tokens after the rows `batch.logit_rows_R`.

    `cache` has fresh pages, to be used once. `images` None = no image.
    """

    batch: Batch
    cache: CacheView
    images: ImageBatch | None
    targets_R: torch.Tensor


def pack(
    samples: Sequence[Sample],
    config: ModelConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    adapter_id: int = 0,
    engram: EngramFeed | None = None,
) -> PackedStep:
    """One step of all samples, in order. `dtype`: of activations; `adapter_id`: of every row and image.

    `engram` fetches the memory rows of a model that has some.
    """
    assert samples and (engram is None) == (config.text.engram is None)
    tables = place([len(sample.prompt) for sample in samples], config.text)
    steps = sequence_steps(samples, tables, config.text, adapter_id)
    rows = {group: 1 + max(int(t[group].max(initial=-1)) for t in tables) for group in tables[0]}
    pages = fresh_pages(config.text, rows, device, dtype)
    step = join_inputs(steps)
    frame = Frames(config.text, dict.fromkeys(rows, 1), device).exact(step, pages)
    if engram is not None:
        frame.put_engram(_engram_rows(step, engram))
    return PackedStep(
        batch=frame.batch,
        cache=frame.cache,
        images=_images(samples, config, device, adapter_id),
        targets_R=torch.from_numpy(np.concatenate([sample.targets for sample in samples])).to(device),
    )


def place(lengths: Sequence[int], text: TextConfig) -> list[Tables]:
    """Where each sequence's rows lie: one after another, one row a page, nothing shared."""
    ratios = {plan.compressor.ratio for plan in text.layers if plan.compressor is not None}
    groups = {"window": 1} | {f"state{ratio}": 1 for ratio in ratios} | {f"pool{ratio}": ratio for ratio in ratios}
    counts = {group: [length // ratio for length in lengths] for group, ratio in groups.items()}
    first = {group: list(accumulate(count, initial=0)) for group, count in counts.items()}
    return [
        {group: np.arange(first[group][s], first[group][s] + counts[group][s], dtype=np.int32) for group in groups}
        for s in range(len(lengths))
    ]


def fresh_pages(
    text: TextConfig, rows: Mapping[str, int], device: torch.device | str, dtype: torch.dtype
) -> dict[tuple[str, int], torch.Tensor]:
    """Memory [rows of its group, 1, row_dim] of every layer for one step: window, pool and index rows."""
    return {
        (plan.kind, plan.layer): new_rows(plan, (rows[plan.group], 1), dtype, device).zero_()
        for plan in cache_plans(text)
        if plan.kind not in _FOR_LATER_STEPS
    }


def sequence_steps(
    samples: Sequence[Sample], tables: Sequence[Tables], text: TextConfig, adapter_id: int
) -> list[StepInput]:
    """Every sample as one step from position 0; image rows are counted over all samples."""
    steps, cells = [], 0
    for sample, table in zip(samples, tables, strict=True):
        prompt = sample.prompt
        index_T = np.where(prompt.image_row_T >= 0, prompt.image_row_T + cells, -1).astype(np.int32)
        cells += sum(plan.llm_grid[0] * plan.llm_grid[1] for plan in prompt.plans)
        step = sequence_input(
            prompt.ids_T,
            prompt.kinds_T,
            0,
            table,
            sample.rows,
            visible_T2=prompt.visible_T2 if prompt.spans else None,
            image_index_T=index_T,
            adapter_id=adapter_id,
        )
        steps.append(step)
    return steps


def _engram_rows(step: StepInput, engram: EngramFeed) -> dict[int, torch.Tensor]:
    before = np.full((len(step.stop_S), engram.store.config.lookback), -1, np.int32)
    rows = engram.start(step.ids_T, step.kinds_T, before, np.cumsum([0, *step.stop_S], dtype=np.int32))
    return rows()


def _images(
    samples: Sequence[Sample], config: ModelConfig, device: torch.device | str, adapter_id: int
) -> ImageBatch | None:
    prompts = [sample.prompt for sample in samples]
    patches = [pixels for prompt in prompts for pixels in prompt.patches]
    if not patches or config.vision is None:
        return None
    grids = [plan.vit_grid for prompt in prompts for plan in prompt.plans]
    return pack_images(patches, grids, config.vision, device=device, adapter_ids=[adapter_id] * len(patches))
