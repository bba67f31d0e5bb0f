"""One step on the device: images, rows, the model, sampled tokens. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.images import pack_images
from spyglass.batch.types import Batch
from spyglass.config.model import ModelConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.images import ImageCache, Key
from spyglass.engine.lead import LeadMemory, LeadSteps
from spyglass.engine.ranks import Ranks
from spyglass.engine.sampler import PendingTokens, SampleInput, UsedTokens, sample
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.engine.transfer import to_device
from spyglass.engram.feed import EngramFeed
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.runtime.step_input import StepInput, adapters_of, join_parts
from spyglass.runtime.steps import ModelParts, StepResult, StepRunner


@dataclass(slots=True, kw_only=True)
class RunningStep:
    """A step under way. `first` row of each chunk; `resumable` (number of a chunk, position): a snapshot is left there.
    It `began` at that time of `perf_counter` and has so many rows `encoded` by the tower.

    `sampled` tokens come from the rows of `sampling`, chunk by chunk.
    """

    chunks: Sequence[Chunk]
    first: Sequence[int]
    resumable: Sequence[tuple[int, int]]
    result: StepResult
    encoded: int = 0
    began: float = 0.0
    sampling: Sequence[Chunk] = ()
    sampled: PendingTokens | None = None
    sampled_rows: dict[int, int] = field(default_factory=dict)  # request -> its last row in `sampled`


class Runner:
    """Runs chunks through a model. Holds no request state: that is in the sequences and in `allocator`.

    `banned` int64 ids are never chosen. `capture`: layers whose streams a step's output has. The last `lookahead`
    tokens of a sequence may be taken back. `ranks` have the other parts of the model, if it is divided.
    """

    def __init__(
        self,
        model: ModelParts,
        config: ModelConfig,
        allocator: CacheAllocator,
        device: torch.device,
        banned: torch.Tensor,
        *,
        images: ImageCache,
        engram: EngramFeed | None = None,
        capture: tuple[int, ...] = (),
        lookahead: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        assert (engram is None) == (config.text.engram is None)
        self._banned, self._banned_V = banned, torch.zeros(config.text.vocab_size, dtype=torch.bool, device=device)
        self._banned_V[banned] = True
        self._config, self._allocator, self._device = config, allocator, device
        self._image_cache, self._engram, self._lookahead = images, engram, lookahead
        given = model, config.text, allocator.page_rows, device, self._banned_V
        if ranks is None:
            self.steps = StepRunner(*given, capture=capture)
        else:
            assert isinstance(allocator.memory, LeadMemory)
            self.steps = LeadSteps(ranks, allocator.memory, *given, capture=capture)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.text.vocab_size

    @property
    def needs_ids(self) -> bool:
        """Whether the host must know all ids of a step before it runs."""
        return self._engram is not None

    def run(
        self,
        chunks: Sequence[Chunk],
        resumable: Sequence[tuple[int, int]],
        before: RunningStep | None,
        ahead: Sequence[tuple[TokenSequence, int]] = (),
        between_layers: Callable[[], object] | None = None,
    ) -> RunningStep:
        """One forward pass over all chunks; afterwards their tokens count as computed. Images `ahead` go through the
        tower too, for a later step. `between_layers` may run steps of other sequences meanwhile.

        Ids that the host does not know yet are those that the step `before` samples.
        """
        engram_rows = self._fetch_engram(chunks)
        images = [_images(chunk) for chunk in chunks]
        needed = [(chunk.sequence, image) for chunk, each in zip(chunks, images, strict=True) for image in each]
        encoded = self._encode_images([*needed, *ahead], between_layers)
        image_rows, image_index_T = _image_rows(chunks, images)
        counts = [chunk.stop - chunk.start for chunk in chunks]
        first = list(accumulate(counts[:-1], initial=0))
        wanted: list[int] = []
        for chunk, start, count in zip(chunks, first, counts, strict=True):
            wanted += range(start + count - chunk.rows_wanted, start + count)
        given = StepInput(
            ids_T=np.concatenate([chunk.sequence.ids(chunk.start, chunk.stop) for chunk in chunks]),
            kinds_T=_kinds(chunks) if any(images) else np.full(sum(counts), TokenKind.TEXT, np.int8),
            start_S=np.array([chunk.start for chunk in chunks], np.int64),
            stop_S=np.array([chunk.stop for chunk in chunks], np.int64),
            table_SP=self._allocator.table_rows(np.array([chunk.sequence.row for chunk in chunks], np.int64)),
            logit_rows_R=np.array(wanted, np.int64),
            resumable=resumable,
            visible_T2=_visible(chunks, images),
            image_index_T=image_index_T,
            adapter_S=adapters_of([chunk.sequence.adapter.adapter_id for chunk in chunks]),
            lookahead=self._lookahead,
        )
        result = self.steps.run(
            given,
            self._allocator.pages,
            image_rows_IC=image_rows,
            engram_rows=engram_rows,
            amend=None if before is None else partial(_put_sampled, chunks, first, before),
            argmax=bool(wanted) and all(chunk.sequence.is_greedy for chunk in chunks if chunk.rows_wanted),
            between_layers=between_layers,
        )
        for chunk in chunks:
            chunk.sequence.computed = chunk.stop
            if chunk.sequence.image_rows:
                _forget_images(chunk)
        return RunningStep(chunks=chunks, first=first, resumable=resumable, result=result, encoded=encoded)

    def sample(self, step: RunningStep, sampling: Sequence[Chunk], allowed: torch.Tensor | None) -> None:
        """Sample a token for every row that is wanted of some chunks of a step; `allowed` as `SampleInput` has it."""
        step.sampling, rows_R, found = sampling, step.result.logit_rows_R, step.result.argmax
        last = accumulate(chunk.rows_wanted for chunk in sampling)
        step.sampled_rows = {c.sequence.request_id: row - 1 for c, row in zip(sampling, last, strict=True)}
        if len(sampling) < sum(chunk.rows_wanted > 0 for chunk in step.chunks):  # some have ended in the meantime
            alive = {chunk.sequence.request_id for chunk in sampling}
            ended = [c.sequence.request_id not in alive for c in step.chunks for _ in range(c.rows_wanted)]
            alive_R = to_device(np.flatnonzero(np.logical_not(ended)), self._device)
            rows_R = rows_R.index_select(0, alive_R)
            found = None if found is None else (found[0].index_select(0, alive_R), found[1].index_select(0, alive_R))
        if found is not None:
            step.sampled = PendingTokens(*found)
            return
        each = [(chunk, number) for chunk in sampling for number in range(chunk.rows_wanted)]
        logits_RV = self.steps.logits(step.result.hidden_TC, rows_R)
        given = SampleInput(
            params=[chunk.sequence.params for chunk, _ in each],
            seed_S=[chunk.sequence.seed for chunk, _ in each],
            position_S=[chunk.stop - chunk.rows_wanted + 1 + number for chunk, number in each],
            used=[used for chunk in sampling for used in _used(chunk)],
            grammar_rows=[r for r, (chunk, _) in enumerate(each) if chunk.sequence.answer.matcher is not None],
            allowed=allowed,
        )
        step.sampled = sample(logits_RV, given, self._banned)

    def logits(self, step: RunningStep, start: int, stop: int) -> torch.Tensor:
        """Logits fp32 [stop - start, V] of rows of a step."""
        return self.steps.logits(step.result.hidden_TC, torch.arange(start, stop, device=self._device))

    def _fetch_engram(self, chunks: Sequence[Chunk]) -> Callable[[], dict[int, torch.Tensor]] | None:
        """Begin to fetch the engram rows of a step; None for models without engram.

        Of sequences that go on, as many tokens again are looked at, which the next step will probably have.
        """
        if self._engram is None:
            return None
        depth = self._engram.store.config.lookback
        rows = self._engram.start(*_engram_step(chunks, depth))
        known = [(chunk, min(chunk.sequence.known, 2 * chunk.stop - chunk.start)) for chunk in chunks]
        if following := [Chunk(chunk.sequence, chunk.stop, stop, 0) for chunk, stop in known if stop > chunk.stop]:
            self._engram.expect(*_engram_step(following, depth))
        return rows

    def _encode_images(
        self, needed: Sequence[tuple[TokenSequence, int]], between_layers: Callable[[], object] | None
    ) -> int:
        """Rows of all images that are first needed now: known ones, and the others, each encoded once; how many."""
        unknown: dict[Key, list[tuple[TokenSequence, int]]] = {}
        for sequence, image in needed:
            if image not in sequence.image_rows:
                key = sequence.prompt.digests[image], sequence.adapter.vision_digest
                rows_IC = self._image_cache.get(key)
                if rows_IC is None:
                    unknown.setdefault(key, []).append((sequence, image))
                else:
                    sequence.image_rows[image] = rows_IC
        if not unknown:
            return 0
        assert self._config.vision is not None, "a prompt with images was accepted without a tower"
        for keys in self._tower_calls(unknown):
            holders = [unknown[key][0] for key in keys]
            batch = pack_images(
                [sequence.prompt.patches[image] for sequence, image in holders],
                [sequence.prompt.plans[image].vit_grid for sequence, image in holders],
                self._config.vision,
                device=self._device,
                adapter_ids=[sequence.adapter.adapter_id for sequence, _ in holders],
            )
            rows = self.steps.encode_images(replace(batch, between_layers=between_layers))
            parts = rows.split([_cells(sequence.prompt, image) for sequence, image in holders])
            for key, part in zip(keys, parts, strict=True):
                self._image_cache.put(key, part)
                for sequence, image in unknown[key]:
                    sequence.image_rows[image] = part
        return sum(_cells(holders[0][0].prompt, holders[0][1]) for holders in unknown.values())

    def _tower_calls(self, unknown: Mapping[Key, Sequence[tuple[TokenSequence, int]]]) -> list[list[Key]]:
        """The images by call of the tower. All in one, unless their rows exceed what a step's tokens are.

        Where images may be cut, each of many requests can begin one in the same step.
        """
        calls: list[list[Key]] = [[]]
        taken = 0
        for key, holders in unknown.items():
            sequence, image = holders[0]
            cells = _cells(sequence.prompt, image)
            if calls[-1] and taken + cells > self._allocator.step_tokens:
                calls.append([])
                taken = 0
            calls[-1].append(key)
            taken += cells
        return calls


def _put_sampled(chunks: Sequence[Chunk], first: Sequence[int], before: RunningStep, batch: Batch) -> None:
    """Write ids that were sampled in the step before, on the device."""
    rows, sources = [], []
    for chunk, row in zip(chunks, first, strict=True):
        known = chunk.sequence.known
        if known < chunk.stop:
            assert known == chunk.stop - 1
            rows.append(row + known - chunk.start)
            sources.append(before.sampled_rows[chunk.sequence.request_id])
    if rows:
        assert before.sampled is not None
        row_J, source_J = (to_device(np.array(each, np.int64), batch.ids_T.device) for each in (rows, sources))
        ids_J = before.sampled.ids_S.index_select(0, source_J)
        batch.ids_T.index_copy_(0, row_J, ids_J.to(batch.ids_T.dtype))


def _used(chunk: Chunk) -> list[UsedTokens | None]:
    """Used tokens for each sampled row: drafts before it count as if they had been drawn."""
    counts = chunk.sequence.answer.counts
    if counts is None:
        return [None] * chunk.rows_wanted
    if not chunk.drafts:
        return [counts.used]
    used: list[UsedTokens | None] = [counts.used.copy()]
    for token in chunk.drafts:
        counts.add(token)
        used.append(counts.used.copy())
    for token in reversed(chunk.drafts):
        counts.remove(token)
    return used


def _images(chunk: Chunk) -> list[int]:
    """Images with tokens in the chunk, in prompt order."""
    if chunk.start >= len(chunk.sequence.prompt):
        return []
    spans = chunk.sequence.prompt.spans
    return [span.image for span in spans if span.start < chunk.stop and span.start + span.length > chunk.start]


def _cells(prompt: Prompt, image: int) -> int:
    rows, columns = prompt.plans[image].llm_grid
    return rows * columns


def _forget_images(chunk: Chunk) -> None:
    """Rows of images whose tokens are all computed are needed no more."""
    spans, held = chunk.sequence.prompt.spans, chunk.sequence.image_rows
    for image in [image for image in held if spans[image].start + spans[image].length <= chunk.stop]:
        del held[image]


def _image_rows(
    chunks: Sequence[Chunk], images: Sequence[Sequence[int]]
) -> tuple[torch.Tensor | None, NDArray[np.int32] | None]:
    """Image rows of all images in the step, and the row of each position of the step (-1 = none)."""
    parts: list[torch.Tensor] = []
    index: list[NDArray[np.int32] | None] = []
    first = 0
    for chunk, seen in zip(chunks, images, strict=True):
        if not seen:
            index.append(None)
            continue
        prompt = chunk.sequence.prompt
        # a prompt counts rows over all its images; the step only has those from `seen[0]` on
        before = sum(_cells(prompt, image) for image in range(seen[0]))
        row_n = _padded(prompt.image_row_T[chunk.start : chunk.stop], chunk.stop - chunk.start, -1)
        index.append(np.where(row_n >= 0, row_n - before + first, -1).astype(np.int32))
        parts += [chunk.sequence.image_rows[image] for image in seen]
        first += sum(_cells(prompt, image) for image in seen)
    return (torch.cat(parts) if parts else None), join_parts(index, _lengths(chunks), -1)


def _visible(chunks: Sequence[Chunk], images: Sequence[Sequence[int]]) -> NDArray[np.int32] | None:
    """`Prompt.visible_T2` of the rows of the step; None without an image."""
    parts = [
        _padded(c.sequence.prompt.visible_T2[c.start : c.stop], c.stop - c.start, 0) if seen else None
        for c, seen in zip(chunks, images, strict=True)
    ]
    return join_parts(parts, _lengths(chunks), 0)


def _lengths(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.stop - chunk.start for chunk in chunks]


def _kinds(chunks: Sequence[Chunk]) -> NDArray[np.int8]:
    return np.concatenate([chunk.sequence.kinds(chunk.start, chunk.stop) for chunk in chunks])


def _engram_step(
    chunks: Sequence[Chunk], depth: int
) -> tuple[NDArray[np.int32], NDArray[np.int8], NDArray[np.int32], NDArray[np.int32]]:
    """Chunks as `EngramFeed.start` takes them: ids, kinds, look-back of so many tokens, where each begins."""
    return (
        np.concatenate([chunk.sequence.ids(chunk.start, chunk.stop) for chunk in chunks]),
        _kinds(chunks),
        np.stack([chunk.sequence.lookback(chunk.start, depth) for chunk in chunks]),
        np.cumsum([0, *(chunk.stop - chunk.start for chunk in chunks)], dtype=np.int32),
    )


def _padded(part: NDArray[np.int32], length: int, value: int) -> NDArray[np.int32]:
    """A slice of a prompt's array, filled up where the chunk goes on into the answer."""
    if len(part) == length:
        return part
    return np.concatenate([part, np.full((length - len(part), *part.shape[1:]), value, part.dtype)])
