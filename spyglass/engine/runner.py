"""One step of the model: pictures, then tokens, through the model's four parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.images import pack_images
from spyglass.config.model import ModelConfig
from spyglass.engine.cache.allocator import CacheAllocator
from spyglass.engine.cache.images import ImageCache, Key
from spyglass.engine.cache.prefix import PrefixCache
from spyglass.engine.sampler import SampledTokens
from spyglass.engine.sequence import Chunk, TokenSequence
from spyglass.engram.feed import EngramFeed
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.runtime.step_input import StepInput, join_parts, slots_of
from spyglass.runtime.steps import ModelParts, StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Hidden states of a step's rows; `first` row of each chunk; `draw_rows` int64 rows whose chunks draw a token.

    `argmax`: id and logit of the best token of each of these, where it was asked for.
    """

    hidden_TC: torch.Tensor
    first: Sequence[int]
    draw_rows: torch.Tensor
    argmax: tuple[torch.Tensor, torch.Tensor] | None = None


class Runner:
    """Turns chunks into hidden states. Holds no request state: that is in the sequences and in `allocator`.

    `banned` int64 ids are never chosen.
    """

    def __init__(
        self,
        model: ModelParts,
        config: ModelConfig,
        allocator: CacheAllocator,
        device: torch.device,
        banned: torch.Tensor,
        *,
        prefixes: PrefixCache,
        images: ImageCache,
        engram: EngramFeed | None = None,
    ) -> None:
        assert (engram is None) == (config.text.engram is None)
        self._prefixes, self._image_cache = prefixes, images
        self._banned_V = torch.zeros(config.text.vocab_size, dtype=torch.bool, device=device)
        self._banned_V[banned] = True
        self._model, self._config, self._allocator, self._device = model, config, allocator, device
        self._engram = engram
        self.steps = StepRunner(model, config.text, allocator.page_rows, device, self._banned_V)

    def run(self, chunks: Sequence[Chunk], *, argmax: bool = False) -> StepOutput:
        """One forward pass over all chunks; afterwards their tokens count as computed."""
        engram_rows = self._fetch_engram(chunks)
        pictures = [_pictures(chunk) for chunk in chunks]
        self._encode_pictures(chunks, pictures)
        rows = np.array([chunk.sequence.row for chunk in chunks], np.int64)
        start = np.array([chunk.start for chunk in chunks], np.int64)
        stop = np.array([chunk.stop for chunk in chunks], np.int64)
        places = [self._prefixes.snapshot_positions(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks]
        resumable = [(seq, place) for seq, each in enumerate(places) for place in each]
        self._allocator.allocate(rows, start, stop, [(int(rows[seq]), place) for seq, place in resumable])
        image_rows, image_index_T = _image_rows(chunks, pictures)
        counts = [chunk.stop - chunk.start for chunk in chunks]
        first = list(accumulate(counts[:-1], initial=0))
        step = StepInput(
            ids_T=np.concatenate([chunk.sequence.ids(chunk.start, chunk.stop) for chunk in chunks]),
            kinds_T=_kinds(chunks) if any(pictures) else np.full(sum(counts), TokenKind.TEXT, np.int8),
            start_S=start,
            stop_S=stop,
            table_SP=self._allocator.table_rows(rows),
            logit_rows_R=np.array(
                [row + count - 1 for chunk, row, count in zip(chunks, first, counts, strict=True) if chunk.draws],
                np.int64,
            ),
            resumable=resumable,
            visible_T2=_visible(chunks, pictures),
            image_index_T=image_index_T,
            slot_S=slots_of([chunk.sequence.adapter.slot for chunk in chunks]),
        )
        result = self.steps.run(
            step, self._allocator.pages, image_rows_IC=image_rows, engram_rows=engram_rows, argmax=argmax
        )
        for seq, place in resumable:
            self._prefixes.store(chunks[seq].sequence, place)
        self._allocator.release_expired(rows, stop)
        for chunk in chunks:
            chunk.sequence.computed = chunk.stop
            if chunk.sequence.image_rows:
                _forget_pictures(chunk)
        return StepOutput(hidden_TC=result.hidden_TC, first=first, draw_rows=result.logit_rows_R, argmax=result.argmax)

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [R, V] of rows of a step."""
        return self._model.logits(hidden_TC, rows_R)

    def argmax(self, output: StepOutput) -> SampledTokens | None:
        """For every row that draws the token of its largest logit that is not banned.

        None if the model knows no way to it that spares the other logits.
        """
        if output.argmax is None:
            return None
        ids_S, logits_S = output.argmax
        sound = [isfinite(logit) for logit in logits_S.tolist()]
        return SampledTokens(ids=ids_S.tolist(), logprobs=[None] * len(sound), sound=sound)

    def _fetch_engram(self, chunks: Sequence[Chunk]) -> Callable[[], dict[int, torch.Tensor]] | None:
        """Begin to fetch the engram rows of a step; None for models without engram."""
        if self._engram is None:
            return None
        depth = self._engram.store.config.lookback
        spans = [(chunk.sequence, chunk.start, chunk.stop) for chunk in chunks]
        return self._engram.start(
            np.concatenate([sequence.ids(start, stop) for sequence, start, stop in spans]),
            _kinds(chunks),
            _lookback(chunks, depth),
            np.cumsum([0, *(stop - start for _, start, stop in spans)], dtype=np.int32),
        )

    def _encode_pictures(self, chunks: Sequence[Chunk], pictures: Sequence[Sequence[int]]) -> None:
        """Rows of all pictures that are first needed now: known ones, and the others, each encoded once."""
        unknown: dict[Key, list[tuple[TokenSequence, int]]] = {}
        for sequence, picture in ((c.sequence, n) for c, each in zip(chunks, pictures, strict=True) for n in each):
            if picture not in sequence.image_rows:
                key = sequence.prompt.digests[picture], sequence.adapter.vision_digest
                rows_IC = self._image_cache.get(key)
                if rows_IC is None:
                    unknown.setdefault(key, []).append((sequence, picture))
                else:
                    sequence.image_rows[picture] = rows_IC
        if not unknown:
            return
        assert self._config.vision is not None, "a prompt with pictures was accepted without a tower"
        for keys in self._calls(unknown):
            first = [unknown[key][0] for key in keys]
            images = pack_images(
                [sequence.prompt.patches[picture] for sequence, picture in first],
                [sequence.prompt.plans[picture].vit_grid for sequence, picture in first],
                [len(sequence.prompt.spans[picture].order) for sequence, picture in first],
                self._config.vision,
                device=self._device,
                slots=[sequence.adapter.slot for sequence, _ in first],
            )
            rows = self._model.encode_images(images)
            parts = rows.split([_cells(sequence.prompt, picture) for sequence, picture in first])
            for key, part in zip(keys, parts, strict=True):
                self._image_cache.put(key, part)
                for sequence, picture in unknown[key]:
                    sequence.image_rows[picture] = part

    def _calls(self, unknown: Mapping[Key, Sequence[tuple[TokenSequence, int]]]) -> list[list[Key]]:
        """The pictures by call of the tower. All in one, unless their rows exceed what a step's tokens are.

        Where pictures may be cut, each of many requests can begin one in the same step.
        """
        calls: list[list[Key]] = [[]]
        taken = 0
        for key, holders in unknown.items():
            sequence, picture = holders[0]
            cells = _cells(sequence.prompt, picture)
            if calls[-1] and taken + cells > self._allocator.step_tokens:
                calls.append([])
                taken = 0
            calls[-1].append(key)
            taken += cells
        return calls


def _pictures(chunk: Chunk) -> list[int]:
    """Pictures with tokens in the chunk, in prompt order."""
    if chunk.start >= len(chunk.sequence.prompt):
        return []
    spans = chunk.sequence.prompt.spans
    return [span.image for span in spans if span.start < chunk.stop and span.start + span.length > chunk.start]


def _cells(prompt: Prompt, picture: int) -> int:
    rows, columns = prompt.plans[picture].llm_grid
    return rows * columns


def _end(prompt: Prompt, picture: int) -> int:
    span = prompt.spans[picture]
    return span.start + span.length


def _forget_pictures(chunk: Chunk) -> None:
    """Rows of pictures whose tokens are all computed are needed no more."""
    sequence = chunk.sequence
    for picture in [p for p in sequence.image_rows if _end(sequence.prompt, p) <= chunk.stop]:
        del sequence.image_rows[picture]


def _image_rows(
    chunks: Sequence[Chunk], pictures: Sequence[Sequence[int]]
) -> tuple[torch.Tensor | None, NDArray[np.int32] | None]:
    """Image rows of all pictures in the step, and the row of each position of the step (-1 = none)."""
    parts: list[torch.Tensor] = []
    index: list[NDArray[np.int32] | None] = []
    first = 0
    for chunk, seen in zip(chunks, pictures, strict=True):
        if not seen:
            index.append(None)
            continue
        prompt = chunk.sequence.prompt
        # a prompt counts rows over all its pictures; the step only has those from `seen[0]` on
        before = sum(_cells(prompt, picture) for picture in range(seen[0]))
        row_n = _padded(prompt.image_row_T[chunk.start : chunk.stop], chunk.stop - chunk.start, -1)
        index.append(np.where(row_n >= 0, row_n - before + first, -1).astype(np.int32))
        parts += [chunk.sequence.image_rows[picture] for picture in seen]
        first += sum(_cells(prompt, picture) for picture in seen)
    return (torch.cat(parts) if parts else None), join_parts(index, _lengths(chunks), -1)


def _visible(chunks: Sequence[Chunk], pictures: Sequence[Sequence[int]]) -> NDArray[np.int32] | None:
    """`Prompt.visible_T2` of the rows of the step; None without a picture."""
    parts = [
        _padded(c.sequence.prompt.visible_T2[c.start : c.stop], c.stop - c.start, 0) if seen else None
        for c, seen in zip(chunks, pictures, strict=True)
    ]
    return join_parts(parts, _lengths(chunks), 0)


def _lengths(chunks: Sequence[Chunk]) -> list[int]:
    return [chunk.stop - chunk.start for chunk in chunks]


def _kinds(chunks: Sequence[Chunk]) -> NDArray[np.int8]:
    return np.concatenate([chunk.sequence.kinds(chunk.start, chunk.stop) for chunk in chunks])


def _lookback(chunks: Sequence[Chunk], depth: int) -> NDArray[np.int32]:
    return np.stack([chunk.sequence.lookback(chunk.start, depth) for chunk in chunks])


def _padded(part: NDArray[np.int32], length: int, value: int) -> NDArray[np.int32]:
    """A slice of a prompt's array, filled up where the chunk goes on into the answer."""
    if len(part) == length:
        return part
    return np.concatenate([part, np.full((length - len(part), *part.shape[1:]), value, part.dtype)])
