"""One step as the model sees it, laid out on the host and taken to the device in one copy.

All index arithmetic of windows (spec v4 4.4, 6.1), compression groups (5.1, 5.2, 5.4) and pages happens here, once per
step, vectorised over all rows; layers only gather.

A `FrameShape` holds every number that shapes or branches may depend on. An exact frame has the numbers of its step. A
frame of a bucket has room for more: what is left over are padding rows (position -1, no key, written nowhere), which
change no bit of the others, and its tensors lie at the same addresses in every step, so that a graph can be captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.types import Batch, CacheView, CompressionStep
from spyglass.config.model import CompressorPlan, TextConfig

Ints = NDArray[np.int64]
Pages = Mapping[tuple[str, int], torch.Tensor]

MAX_ROWS = 64  # of a step on a CPU that has a bucket: in larger ones the kernels take the time
_MAX_ROWS_EACH = 8  # of one sequence: a token and drafts
_VISIBLE_ROUNDING = 64  # compressed rows, on a CPU
_MAX_FRAMES = 64
_CUDA_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_CUDA_TOKENS = 2048  # the smallest bucket of context lengths, and then four times as much, and so on
_ALIGNMENT = 64  # bytes; each tensor of a frame begins at a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The rows of all sequences of a step, at least one each, one sequence behind the other, on the host.

    `ids_T` int32 (-1 at images), `kinds_T` TokenKind. Rows [start_S, stop_S) of each sequence. `table_SP` int32 by
    group: the page of every logical page, long enough for the rows after this step, padded with -1. `logit_rows_R`
    count from the first row of the step. `resumable` (sequence, position) pairs: un-compressed rows before each
    position are kept too, so that what is in memory after the step suffices to go on from there. `visible_T2` extra
    keys left and right (`Prompt.visible_T2`); `image_index_T` int32 row of this step's image rows or -1. What no
    sequence has is None.
    """

    ids_T: NDArray[np.int32]
    kinds_T: NDArray[np.int8]
    start_S: Ints
    stop_S: Ints
    table_SP: Mapping[str, NDArray[np.int32]]
    logit_rows_R: Ints
    resumable: Sequence[tuple[int, int]] = ()
    visible_T2: NDArray[np.int32] | None = None
    image_index_T: NDArray[np.int32] | None = None
    slot_S: Ints | None = None


def sequence_input(
    ids_T: NDArray[np.int32],
    kinds_T: NDArray[np.int8],
    start: int,
    tables: Mapping[str, NDArray[np.int32]],
    logit_rows: Sequence[int] | NDArray[np.int64],
    *,
    visible_T2: NDArray[np.int32] | None = None,
    image_index_T: NDArray[np.int32] | None = None,
    slot: int = 0,
    resumable: Sequence[int] = (),
) -> StepInput:
    """A step of one sequence, rows from position `start` on; `tables` [P] by group, `logit_rows` from its first row."""
    return StepInput(
        ids_T=ids_T,
        kinds_T=kinds_T,
        start_S=np.array([start], np.int64),
        stop_S=np.array([start + len(ids_T)], np.int64),
        table_SP={group: table[None] for group, table in tables.items()},
        logit_rows_R=np.asarray(logit_rows, np.int64),
        resumable=[(0, position) for position in resumable],
        visible_T2=visible_T2,
        image_index_T=image_index_T,
        slot_S=slots_of([slot]),
    )


def join_inputs(steps: Sequence[StepInput]) -> StepInput:
    """The sequences of several steps as one step; image rows are counted over all of them already."""
    counts = [len(step.ids_T) for step in steps]
    sequences = [len(step.start_S) for step in steps]
    first = np.cumsum([0, *counts])
    first_sequence = np.cumsum([0, *sequences])
    slots = [
        slot for s, n in zip(steps, sequences, strict=True) for slot in (s.slot_S if s.slot_S is not None else [0] * n)
    ]
    return StepInput(
        ids_T=np.concatenate([step.ids_T for step in steps]),
        kinds_T=np.concatenate([step.kinds_T for step in steps]),
        start_S=np.concatenate([step.start_S for step in steps]),
        stop_S=np.concatenate([step.stop_S for step in steps]),
        table_SP={group: _stack([step.table_SP[group] for step in steps]) for group in steps[0].table_SP},
        logit_rows_R=np.concatenate([step.logit_rows_R + at for step, at in zip(steps, first, strict=False)]),
        resumable=[(int(n) + q, p) for step, n in zip(steps, first_sequence, strict=False) for q, p in step.resumable],
        visible_T2=join_parts([step.visible_T2 for step in steps], counts, 0),
        image_index_T=join_parts([step.image_index_T for step in steps], counts, -1),
        slot_S=slots_of(slots),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameShape:
    """Room of a frame: all that shapes and branches depend on; two steps of one shape differ in tensors only.

    `rows` T, `sequences` S, `logit_rows` R; `window_width` bounds the window of a row. By compression ratio: `closing`,
    the compressed rows P that can be made, and `visible`, a bound of those that a row sees. `table_widths` by group.
    `images`: rows of images may come, and with `image_rows` rows of the aligner; `adapters`: rows may have one.
    """

    rows: int
    sequences: int
    logit_rows: int
    window_width: int
    closing: tuple[tuple[int, int], ...]
    visible: tuple[tuple[int, int], ...]
    table_widths: tuple[tuple[str, int], ...]
    images: bool
    image_rows: bool
    adapters: bool


@dataclass(slots=True, kw_only=True)
class Frame:
    """A step in its buffers. `num_rows` of its rows and `num_logit_rows` of its logit rows are real, the first ones.

    `reused`: the tensors are those of every step of this shape; they hold until the next one is filled.
    """

    shape: FrameShape
    batch: Batch
    cache: CacheView
    num_rows: int
    num_logit_rows: int
    reused: bool = False

    @property
    def logit_rows_R(self) -> torch.Tensor:
        """The rows whose logits are wanted, without padding."""
        return self.batch.logit_rows_R[: self.num_logit_rows]

    def put_engram(self, rows: Mapping[int, torch.Tensor]) -> None:
        """Hand over the gathered rows [T, width] of each layer's memory table."""
        if not self.reused:
            self.batch = replace(self.batch, engram_rows=dict(rows))
            return
        held = self.batch.engram_rows
        if not held:
            device = self.batch.ids_T.device
            held = {
                layer: torch.zeros(self.shape.rows, *given.shape[1:], dtype=given.dtype, device=device)
                for layer, given in rows.items()
            }
            self.batch = replace(self.batch, engram_rows=held)
        for layer, given in rows.items():
            held[layer][: self.num_rows].copy_(given, non_blocking=True)


class Frames:
    """Makes frames for one driver. `page_rows` gives the rows per page by group.

    `exact` frames are fresh memory; `fill` lays a step that has a bucket into the frame of that bucket.
    """

    def __init__(
        self,
        text: TextConfig,
        page_rows: Mapping[str, int],
        device: torch.device | str = "cpu",
        capture: tuple[int, ...] = (),
    ) -> None:
        self._text, self._page_rows, self._device = text, page_rows, torch.device(device)
        self._capture = capture
        self._compressors = {
            layer.compressor.ratio: layer.compressor for layer in text.layers if layer.compressor is not None
        }
        self._topk = {layer.ratio: text.index_topk for layer in text.layers if layer.index_from is not None}
        self._held: OrderedDict[FrameShape, tuple[_Buffers, Frame]] = OrderedDict()

    def exact(self, step: StepInput, pages: Pages) -> Frame:
        """The step and nothing else, in memory of its own.

        `pages[kind, layer]` [num_pages, page_rows, row_dim] are passed through.
        """
        values = self._values(step)
        shape = self._exact_shape(step, values)
        return self._lay_out(values, shape, _Buffers(shape, self._fields(shape), self._device), pages)

    def fill(self, step: StepInput, pages: Pages, shape: FrameShape | None = None) -> Frame:
        """The step in the frame of its bucket, or of `shape`, which must hold it; exact if it has no bucket."""
        values = self._values(step)
        if shape is None:
            exact = self._exact_shape(step, values)
            shape = self._bucket(step, exact)
            if shape is None:
                return self._lay_out(values, exact, _Buffers(exact, self._fields(exact), self._device), pages)
        return self._reuse(values, shape, pages)

    def shape_of(self, step: StepInput) -> FrameShape:
        """The least room that holds the step."""
        return self._exact_shape(step, self._values(step))

    def padding(self, shape: FrameShape, pages: Pages) -> Frame:
        """The frame of a bucket with padding rows alone: running it changes nothing."""
        return self._reuse({}, shape, pages)

    def _reuse(self, values: _Values, shape: FrameShape, pages: Pages) -> Frame:
        held = self._held.get(shape)
        if held is None:
            buffers = _Buffers(shape, self._fields(shape), self._device)
            frame = self._lay_out(values, shape, buffers, pages)
            frame.reused = True
            self._held[shape] = buffers, frame
            if len(self._held) > _MAX_FRAMES:
                self._held.popitem(last=False)
            return frame
        self._held.move_to_end(shape)
        buffers, frame = held
        buffers.fill(values)
        frame.num_rows, frame.num_logit_rows = len(values.get("ids_T", ())), len(values.get("logit_rows_R", ()))
        if frame.cache.pages is not pages:
            frame.cache = replace(frame.cache, pages=pages)
        return frame

    def _lay_out(self, values: _Values, shape: FrameShape, buffers: _Buffers, pages: Pages) -> Frame:
        buffers.fill(values)
        tensors = buffers.tensors
        visible = dict(shape.visible)
        batch = Batch(
            ids_T=tensors["ids_T"],
            kinds_T=tensors["kinds_T"],
            positions_T=tensors["positions_T"],
            seq_T=tensors["seq_T"],
            window_lo_T=tensors["window_lo_T"],
            window_hi_T=tensors["window_hi_T"],
            window_width=shape.window_width,
            image_index_T=tensors.get("image_index_T"),
            has_images=shape.images,
            logit_rows_R=tensors["logit_rows_R"],
            slot_T=tensors.get("slot_T"),
            capture=self._capture,
        )
        cache = CacheView(
            pages=pages,
            table_SP={group: tensors[f"table {group}"] for group, _ in shape.table_widths},
            window_write_T=tensors["window_write_T"],
            compression={
                ratio: CompressionStep(
                    ratio=ratio,
                    sources_PB=tensors[f"sources_PB {ratio}"],
                    positions_P=tensors[f"positions_P {ratio}"],
                    write_P=tensors[f"write_P {ratio}"],
                    phase_T=tensors[f"phase_T {ratio}"],
                    state_write_T=tensors.get(f"state_write_T {ratio}"),
                    visible_T=tensors[f"visible_T {ratio}"],
                    max_visible=visible[ratio],
                )
                for ratio in self._compressors
            },
        )
        return Frame(
            shape=shape,
            batch=batch,
            cache=cache,
            num_rows=len(values.get("ids_T", ())),
            num_logit_rows=len(values.get("logit_rows_R", ())),
        )

    def _fields(self, shape: FrameShape) -> list[_Field]:
        T, S = shape.rows, shape.sequences
        fields = [
            _Field("ids_T", np.int32, (T,), -1),
            _Field("kinds_T", np.int8, (T,), -1),
            _Field("positions_T", np.int32, (T,), -1),
            _Field("seq_T", np.int32, (T,), 0),
            _Field("window_lo_T", np.int32, (T,), 0),
            _Field("window_hi_T", np.int32, (T,), -1),
            _Field("window_write_T", np.int64, (T,), -1),
            _Field("logit_rows_R", np.int64, (shape.logit_rows,), 0),
        ]
        if shape.image_rows:
            fields.append(_Field("image_index_T", np.int32, (T,), -1))
        if shape.adapters:
            fields.append(_Field("slot_T", np.int32, (T,), 0))
        for ratio, closing in shape.closing:
            compressor = self._compressors[ratio]
            fields += [
                _Field(f"sources_PB {ratio}", np.int32, (closing, compressor.group_rows), 0),  # any row
                _Field(f"positions_P {ratio}", np.int32, (closing,), 0),
                _Field(f"write_P {ratio}", np.int64, (closing,), -1),
                _Field(f"phase_T {ratio}", np.int64, (T,), 0),
                _Field(f"visible_T {ratio}", np.int32, (T,), 0),
            ]
            if compressor.gated:
                fields.append(_Field(f"state_write_T {ratio}", np.int64, (T,), -1))
        return fields + [_Field(f"table {group}", np.int32, (S, width), -1) for group, width in shape.table_widths]

    def _values(self, step: StepInput) -> _Values:
        rows = _rows(step)
        tables = _Tables(table_SP=step.table_SP, page_rows=self._page_rows)
        lo_T, hi_T = _window(step, rows, self._text.sliding_window)
        values: _Values = {
            "ids_T": step.ids_T,
            "kinds_T": step.kinds_T,
            "positions_T": rows.position_T,
            "seq_T": rows.seq_T,
            "window_lo_T": lo_T,
            "window_hi_T": hi_T,
            "window_write_T": tables.flat("window", rows.seq_T, rows.position_T),
            "logit_rows_R": step.logit_rows_R,
        }
        if step.image_index_T is not None:
            values["image_index_T"] = step.image_index_T
        if step.slot_S is not None:
            values["slot_T"] = step.slot_S[rows.seq_T]
        for compressor in self._compressors.values():
            values |= _compression(compressor, rows, tables)
        return values | {f"table {group}": table for group, table in step.table_SP.items()}

    def _exact_shape(self, step: StepInput, values: _Values) -> FrameShape:
        longest = int(step.stop_S.max())
        return FrameShape(
            rows=len(step.ids_T),
            sequences=len(step.start_S),
            logit_rows=len(step.logit_rows_R),
            window_width=int((values["window_hi_T"] - values["window_lo_T"]).max()) + 1,
            closing=tuple((ratio, len(values[f"write_P {ratio}"])) for ratio in self._compressors),
            visible=tuple((ratio, longest // ratio) for ratio in self._compressors),
            table_widths=tuple((group, table.shape[1]) for group, table in step.table_SP.items()),
            images=bool(step.kinds_T.max() >= 0),
            image_rows=step.image_index_T is not None and bool(step.image_index_T.max() >= 0),
            adapters=step.slot_S is not None,
        )

    def _bucket(self, step: StepInput, exact: FrameShape) -> FrameShape | None:
        """Room for many steps like this one: a few rows of each sequence, no images. None for any other.

        Room costs time where rows are computed one after another, so on a CPU only bounds are rounded up, and either
        no sequence closes a group or all may.
        """
        few = exact.rows == exact.sequences or int((step.stop_S - step.start_S).max()) <= _MAX_ROWS_EACH
        if exact.images or not few or exact.window_width > self._text.sliding_window:
            return None
        if self._device.type != "cuda":
            if exact.rows > MAX_ROWS:
                return None
            return replace(
                exact,
                window_width=self._text.sliding_window,
                closing=tuple((ratio, count and exact.rows) for ratio, count in exact.closing),
                visible=tuple((ratio, self._rounded(ratio, most)) for ratio, most in exact.visible),
            )
        rows = next((rows for rows in _CUDA_ROWS if rows >= exact.rows), None)
        if rows is None:
            return None
        tokens = _CUDA_TOKENS
        while tokens < step.stop_S.max():
            tokens *= 4
        visible = {
            ratio: min(tokens // ratio, self._topk.get(ratio, tokens))
            if most <= self._topk.get(ratio, 0)
            else tokens // ratio
            for ratio, most in exact.visible
        }
        return replace(
            exact,
            rows=rows,
            sequences=rows,
            logit_rows=rows,
            window_width=self._text.sliding_window,
            closing=tuple((ratio, rows) for ratio, _ in exact.closing),
            visible=tuple(visible.items()),
            table_widths=tuple((group, self._width(group, width, tokens)) for group, width in exact.table_widths),
        )

    def _rounded(self, ratio: int, most: int) -> int:
        """A bound of visible rows on a CPU; where all of them are attended, it stays one of what is attended."""
        rounded = -(-most // _VISIBLE_ROUNDING) * _VISIBLE_ROUNDING
        topk = self._topk.get(ratio)
        return min(rounded, topk) if topk is not None and most <= topk else rounded

    def _width(self, group: str, width: int, tokens: int) -> int:
        """Columns of a table: those of a ring are counted modulo its width, so they stay; others hold `tokens`."""
        if not group.startswith("pool"):
            return width
        return max(1, -(-(tokens // int(group.removeprefix("pool"))) // self._page_rows[group]))


_Values = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    dtype: type[np.signedinteger[Any]]
    dims: tuple[int, ...]
    padding: int


class _Buffers:
    """The tensors of a frame as parts of one block; for a GPU two blocks of pinned memory take turns in filling it."""

    def __init__(self, shape: FrameShape, fields: Sequence[_Field], device: torch.device) -> None:
        self._fields = fields
        self._starts: dict[str, int] = {}
        size = 0
        for one in fields:
            self._starts[one.name] = size
            size += -(-int(np.prod(one.dims)) * np.dtype(one.dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        on_host = device.type == "cpu"
        with torch.inference_mode(False):
            blocks = [
                torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
                for _ in range(1 if on_host else 2)
            ]
            self._block = blocks[0] if on_host else torch.empty(size, dtype=torch.uint8, device=device)
            self.tensors = {one.name: self._view(self._block, one) for one in fields}
        self._staging = [(block, {one.name: self._view(block, one).numpy() for one in fields}) for block in blocks]
        self._copied: list[torch.cuda.Event | None] = [None for _ in blocks]
        self._turn = 0

    def _view(self, block: torch.Tensor, one: _Field) -> torch.Tensor:
        first, dtype = self._starts[one.name], _TORCH_DTYPES[one.dtype]
        return block[first : first + int(np.prod(one.dims)) * dtype.itemsize].view(dtype).view(one.dims)

    def fill(self, values: _Values) -> None:
        """Write these values and padding behind them."""
        self._turn = (self._turn + 1) % len(self._staging)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        block, arrays = self._staging[self._turn]
        for one in self._fields:
            array, given = arrays[one.name], values.get(one.name)
            if given is None:
                array.fill(one.padding)
            elif given.shape == array.shape:
                array[...] = given
            else:
                _write(one, array, given)
        if len(self._staging) > 1:
            self._block.copy_(block, non_blocking=True)
            if self._block.is_cuda:
                event = self._copied[self._turn] or torch.cuda.Event()
                event.record()
                self._copied[self._turn] = event


def _write(one: _Field, array: NDArray[Any], given: NDArray[Any]) -> None:
    if given.ndim == 2 and given.shape[1] != array.shape[1]:
        assert one.name.startswith("table pool"), f"{one.name} has {given.shape[1]} columns, its frame {array.shape[1]}"
        given = given[:, : array.shape[1]]
    assert len(given) <= len(array), f"{one.name}: {len(given)} rows, room for {len(array)}"
    array.fill(one.padding)
    array[tuple(slice(size) for size in given.shape)] = given


_TORCH_DTYPES: Mapping[type[np.signedinteger[Any]], torch.dtype] = {
    np.int8: torch.int8,
    np.int32: torch.int32,
    np.int64: torch.int64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """All rows of the step, packed: sequence, absolute position, and per sequence first row, start and stop
    position; `resumable` (sequence, position) pairs."""

    seq_T: Ints
    position_T: Ints
    first_S1: Ints
    start_S: Ints
    stop_S: Ints
    resumable: Sequence[tuple[int, int]]

    def before_stops(self, reach: int) -> NDArray[np.bool_] | None:
        """Rows among the last `reach` ones before the end of their sequence or a resumable position, bool [T].

        None = all of them: every sequence has one row.
        """
        if len(self.seq_T) == len(self.start_S):
            return None
        kept_T = self.position_T >= self.stop_S[self.seq_T] - reach
        for seq, place in self.resumable:
            offset = self.first_S1[seq] - self.start_S[seq]
            kept_T[offset + max(self.start_S[seq], place - reach) : offset + place] = True
        return kept_T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tables:
    """Stacked page tables by group, and rows per page by group."""

    table_SP: Mapping[str, NDArray[np.int32]]
    page_rows: Mapping[str, int]

    def flat(self, group: str, seq: Ints, row: Ints) -> Ints:
        """Flat page row of logical row `row` of sequence `seq` (CacheView's rule)."""
        table, rows = self.table_SP[group], self.page_rows[group]
        if not len(seq):
            return seq
        width = table.shape[1]
        logical, offset = np.divmod(row, rows)
        page: Ints = table.reshape(-1).take(seq * width + logical % width).astype(np.int64)
        assert page.min() >= 0, f"a row of group {group} lies in a page that was never given or already taken back"
        return page * rows + offset


def slots_of(slots: Sequence[int]) -> Ints | None:
    """Adapter slot of each sequence; None when no sequence has an adapter."""
    return np.array(slots, np.int64) if any(slots) else None


def join_parts(
    parts: Sequence[NDArray[np.int32] | None], counts: Sequence[int], absent: int
) -> NDArray[np.int32] | None:
    """Rows of all sequences, `absent` where a sequence has none; None when no sequence has any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    shape = known[0].shape[1:]
    return np.concatenate(
        [np.full((n, *shape), absent, np.int32) if p is None else p for p, n in zip(parts, counts, strict=True)]
    )


def _rows(packed: StepInput) -> _Rows:
    start_S = packed.start_S
    first_S1 = np.arange(len(start_S) + 1)
    if len(packed.ids_T) == len(start_S):  # decoding: one row each
        seq_T, position_T = first_S1[:-1], start_S
    else:
        count_S = packed.stop_S - start_S
        seq_T = np.repeat(first_S1[:-1], count_S)
        first_S1[1:] = count_S.cumsum()
        position_T = np.arange(len(seq_T)) + (start_S - first_S1[:-1])[seq_T]
    return _Rows(
        seq_T=seq_T,
        position_T=position_T,
        first_S1=first_S1,
        start_S=start_S,
        stop_S=packed.stop_S,
        resumable=packed.resumable,
    )


def _stack(tables: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    """Tables [S, P] of different widths below one another, padded with -1 (no page)."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=-1) for t in tables])


def _window(packed: StepInput, rows: _Rows, window: int) -> tuple[Ints, Ints]:
    """First and last window position each row sees: W - 1 back or to its span's start, right to its span's end."""
    if packed.visible_T2 is None:
        return np.maximum(rows.position_T - (window - 1), 0), rows.position_T
    left_T, right_T = packed.visible_T2.astype(np.int64).T
    hi_T = rows.position_T + right_T
    assert (hi_T < rows.stop_S[rows.seq_T]).all(), "a chunk ends inside a span; the scheduler must not cut there"
    return np.maximum(rows.position_T - np.maximum(left_T, window - 1), 0), hi_T


def _compression(compressor: CompressorPlan, rows: _Rows, tables: _Tables) -> _Values:
    """Groups that close in this step, the rows they read, and which rows must be kept for later groups."""
    ratio = compressor.ratio
    open_T, phase_T = np.divmod(rows.position_T, ratio)
    closes_T = phase_T == ratio - 1
    row_P = closes_T.nonzero()[0]
    seq_P, entry_P = rows.seq_T[row_P], open_T[row_P]
    values = {
        f"sources_PB {ratio}": _sources(compressor, rows, tables, seq_P, entry_P),
        f"positions_P {ratio}": entry_P * ratio,
        f"write_P {ratio}": tables.flat(f"pool{ratio}", seq_P, entry_P),
        f"phase_T {ratio}": phase_T,
        f"visible_T {ratio}": open_T + closes_T,
    }
    if compressor.gated:
        values[f"state_write_T {ratio}"] = _state_writes(compressor, rows, tables)
    return values


def _sources(compressor: CompressorPlan, rows: _Rows, tables: _Tables, seq_P: Ints, entry_P: Ints) -> Ints:
    """`CompressionStep.sources_PB`."""
    ratio, reach = compressor.ratio, compressor.group_rows
    if not len(seq_P):
        return np.empty((0, reach), np.int64)
    token_PB = (entry_P[:, None] + 1) * ratio - reach + np.arange(reach)
    start_P1 = rows.start_S[seq_P][:, None]
    earlier_PB = token_PB < start_P1
    sources_PB = np.where(earlier_PB, -1, token_PB - start_P1 + rows.first_S1[seq_P][:, None])
    if compressor.gated:
        carried = earlier_PB & (token_PB >= 0)
        seq_PB = np.broadcast_to(seq_P[:, None], token_PB.shape)
        sources_PB[carried] = -2 - tables.flat(f"state{ratio}", seq_PB[carried], token_PB[carried])
    else:
        assert not earlier_PB.any(), "a compressor without state cannot read rows of an earlier step"
    return sources_PB


def _state_writes(compressor: CompressorPlan, rows: _Rows, tables: _Tables) -> Ints:
    """`CompressionStep.state_write_T`."""
    group, kept_T = f"state{compressor.ratio}", rows.before_stops(compressor.group_rows)
    if kept_T is None:
        return tables.flat(group, rows.seq_T, rows.position_T)
    state_write_T = np.full(len(kept_T), -1, np.int64)
    state_write_T[kept_T] = tables.flat(group, rows.seq_T[kept_T], rows.position_T[kept_T])
    return state_write_T
