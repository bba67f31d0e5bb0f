"""The smallest driver of a model: sequences, their memory, and one call per step. No scheduler, no sampling.

Memory starts as NaN and its pages are dealt out in a shuffled order, so a row that is read before it was written, or
found through the wrong table, shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.rows import new_rows, poison
from spyglass.batch.types import Batch, CacheView
from spyglass.config.cache import cache_plans
from spyglass.config.model import TextConfig
from spyglass.model import VisionLanguageModel
from spyglass.prompt.tokens import TokenKind
from spyglass.runtime.frame import Frames
from spyglass.runtime.step_input import StepInput, join_inputs, sequence_input


@dataclass(kw_only=True)
class Tokens:
    """A sequence as the model sees it. Picture positions hold id -1; `image_row_T` counts `image_rows`."""

    ids_T: NDArray[np.int32]
    kinds_T: NDArray[np.int8]
    visible_T2: NDArray[np.int32]
    image_row_T: NDArray[np.int32]
    image_rows: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids_T)

    def cut(self, start: int, stop: int) -> Tokens:
        part = slice(start, stop)
        return Tokens(
            ids_T=self.ids_T[part],
            kinds_T=self.kinds_T[part],
            visible_T2=self.visible_T2[part],
            image_row_T=self.image_row_T[part],
            image_rows=self.image_rows,
        )

    def legal_cut(self, place: int) -> bool:
        """Whether a step may end before position `place`: no cut strictly between START and END."""
        return place >= len(self) or int(self.visible_T2[place, 0]) == 0


def text_tokens(ids: Sequence[int] | NDArray[np.int64]) -> Tokens:
    """A sequence of text ids."""
    count = len(ids)
    return Tokens(
        ids_T=np.asarray(ids, np.int32),
        kinds_T=np.full(count, TokenKind.TEXT, np.int8),
        visible_T2=np.zeros((count, 2), np.int32),
        image_row_T=np.full(count, -1, np.int32),
    )


def picture_tokens(
    ids: Sequence[int] | NDArray[np.int64], vocab_size: int, orders: Sequence[Sequence[int]], rows: torch.Tensor | None
) -> Tokens:
    """From the released convention, id = vocab_size + kind (spec v4 9.6).

    `orders[j]` is the aligner row of each IMAGE slot of picture j; `rows` all pictures' aligner rows.
    """
    tokens = text_tokens(ids)
    kinds = np.where(tokens.ids_T >= vocab_size, tokens.ids_T - vocab_size, -1).astype(np.int8)
    tokens.kinds_T = kinds
    tokens.ids_T = np.where(kinds >= 0, -1, tokens.ids_T)
    first = np.concatenate([[0], np.cumsum([len(order) for order in orders])[:-1]]) if len(orders) else []
    flat = [start + np.asarray(order) for start, order in zip(first, orders, strict=True)]
    tokens.image_row_T[kinds == TokenKind.IMAGE] = np.concatenate(flat) if flat else []
    tokens.image_rows = rows
    starts, ends = np.flatnonzero(kinds == TokenKind.START), np.flatnonzero(kinds == TokenKind.END)
    for start, end in zip(starts, ends, strict=True):
        inside = np.arange(start, end + 1)
        tokens.visible_T2[inside, 0] = inside - start
        tokens.visible_T2[inside, 1] = end - inside
    return tokens


@dataclass(kw_only=True)
class Memory:
    """Pages for `sequences` sequences of at most `length` tokens; every group keeps all rows unless `ring` is given."""

    text: TextConfig
    dtype: torch.dtype
    sequences: int
    length: int
    ring: int | None = None  # tokens per step for which window and state groups get rings
    device: str | torch.device = "cpu"
    seed: int = 0
    page_rows: dict[str, int] = field(default_factory=dict)
    stored: bool = False  # rows as codes
    pages: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    tables: list[dict[str, NDArray[np.int32]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shuffle = np.random.default_rng(self.seed)
        self.tables = [{} for _ in range(self.sequences)]
        counts: dict[str, int] = {}
        for number, plan in enumerate(cache_plans(self.text, stored=self.stored)):
            rows = self.page_rows.setdefault(plan.group, (5, 7, 3, 4)[number % 4])
            kept = self.length // plan.tokens_per_row
            if self.ring is not None and plan.retention is not None:
                kept = min(kept, plan.retention + self.ring + rows)
            count = counts.setdefault(plan.group, -(-max(kept, 1) // rows))
            if plan.group not in self.tables[0]:
                order = shuffle.permutation(self.sequences * count).astype(np.int32).reshape(self.sequences, count)
                for table, mine in zip(self.tables, order, strict=True):
                    table[plan.group] = mine
            pages = new_rows(plan, (self.sequences * count, rows), self.dtype, self.device)
            self.pages[plan.kind, plan.layer] = poison(pages)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one sequence contributes to a step."""

    sequence: int
    tokens: Tokens  # only the rows of this step
    start: int


def build_step(memory: Memory, parts: Sequence[Part]) -> tuple[Batch, CacheView, torch.Tensor | None]:
    """Batch, cache and image rows of one step; logits of every row are wanted."""
    step, rows = step_input(memory, parts)
    frame = Frames(memory.text, memory.page_rows, memory.device).exact(step, memory.pages)
    return frame.batch, frame.cache, rows


def step_input(memory: Memory, parts: Sequence[Part]) -> tuple[StepInput, torch.Tensor | None]:
    """One step and its image rows; logits of every row are wanted."""
    steps, rows, first = [], [], 0
    for part in parts:
        tokens = part.tokens
        index = tokens.image_row_T + np.where(tokens.image_row_T >= 0, first, 0).astype(np.int32)
        if tokens.image_rows is not None:
            rows.append(tokens.image_rows)
            first += len(tokens.image_rows)
        steps.append(
            sequence_input(
                tokens.ids_T,
                tokens.kinds_T,
                part.start,
                memory.tables[part.sequence],
                range(len(tokens)),
                visible_T2=tokens.visible_T2 if tokens.visible_T2.any() else None,
                image_index_T=index if (index >= 0).any() else None,
            )
        )
    return join_inputs(steps), torch.cat(rows).to(memory.device) if rows else None


def run(model: VisionLanguageModel, memory: Memory, parts: Sequence[Part]) -> torch.Tensor:
    """Logits fp32 of every row of the step, on the host."""
    batch, cache, rows = build_step(memory, parts)
    with torch.inference_mode():
        out: torch.Tensor = model(batch, cache, rows)
    return out.cpu()


def memory_for(
    model: VisionLanguageModel, sequences: int, length: int, ring: int | None = None, stored: bool = False
) -> Memory:
    """Memory of the model's dtype on its device."""
    build = model.options.build
    return Memory(
        text=model.config.text,
        dtype=build.dtype,
        sequences=sequences,
        length=length,
        ring=ring,
        device=build.device,
        stored=stored,
    )


def prefill(
    model: VisionLanguageModel, tokens: Tokens, cuts: Sequence[int] = (), ring: int | None = None
) -> torch.Tensor:
    """Logits [T, V] of a sequence alone, run in steps that end at `cuts`."""
    memory = memory_for(model, 1, len(tokens), ring)
    bounds = [0, *cuts, len(tokens)]
    return torch.cat(
        [
            run(model, memory, [Part(sequence=0, tokens=tokens.cut(start, stop), start=start)])
            for start, stop in pairwise(bounds)
        ]
    )
