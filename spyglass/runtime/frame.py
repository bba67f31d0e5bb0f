"""One step as the model sees it, laid out on the host and taken to the device in one copy.

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
from spyglass.config.model import TextConfig
from spyglass.runtime.indices import StepValues, compressors_of, step_values
from spyglass.runtime.step_input import StepInput

Pages = Mapping[tuple[str, int], torch.Tensor]

MAX_ROWS = 64  # of a step on a CPU that has a bucket: in larger ones the kernels take the time
_MAX_ROWS_EACH = 8  # of one sequence: a token and drafts
_VISIBLE_ROUNDING = 64  # compressed rows, on a CPU
_MAX_FRAMES = 256
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_GPU_TOKENS = 2048  # the smallest bucket of context lengths, and then four times as much, and so on
_ALIGNMENT = 64  # bytes; each tensor of a frame begins at a multiple


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
    images: bool = False
    image_rows: bool = False
    adapters: bool


@dataclass(slots=True, kw_only=True, eq=False)  # a frame is its addresses
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
        self._compressors = compressors_of(text)
        self._topk = {layer.ratio: text.index_topk for layer in text.layers if layer.index_from is not None}
        self._held: OrderedDict[FrameShape, tuple[_Buffers, Frame]] = OrderedDict()

    def exact(self, step: StepInput, pages: Pages) -> Frame:
        """The step and nothing else, in memory of its own.

        `pages[kind, layer]` [num_pages, page_rows, row_dim] are passed through.
        """
        values = step_values(step, self._text, self._page_rows)
        shape = self._exact_shape(step, values)
        return self._lay_out(values, shape, _Buffers(shape, self._fields(shape), self._device), pages)

    def fill(self, step: StepInput, pages: Pages, shape: FrameShape | None = None) -> Frame:
        """The step in the frame of its bucket, or of `shape`, which must hold it; exact if it has no bucket."""
        values = step_values(step, self._text, self._page_rows)
        if shape is None:
            exact = self._exact_shape(step, values)
            shape = self._bucket(step, exact)
            if shape is None:
                if self._device.type != "cpu" and exact.rows <= GPU_ROWS[-1]:  # so that kernels meet few sizes
                    exact = replace(exact, rows=next(rows for rows in GPU_ROWS if rows >= exact.rows))
                return self._lay_out(values, exact, _Buffers(exact, self._fields(exact), self._device), pages)
        return self._reuse(values, shape, pages)

    def shape_of(self, step: StepInput) -> FrameShape:
        """The least room that holds the step."""
        return self._exact_shape(step, step_values(step, self._text, self._page_rows))

    def padding(self, shape: FrameShape, pages: Pages) -> Frame:
        """The frame of a bucket with padding rows alone: running it changes nothing."""
        return self._reuse({}, shape, pages)

    def _reuse(self, values: StepValues, shape: FrameShape, pages: Pages) -> Frame:
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

    def _lay_out(self, values: StepValues, shape: FrameShape, buffers: _Buffers, pages: Pages) -> Frame:
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
            adapter_T=tensors.get("adapter_T"),
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
            fields.append(_Field("adapter_T", np.int32, (T,), 0))
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

    def _exact_shape(self, step: StepInput, values: StepValues) -> FrameShape:
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
            adapters=step.adapter_S is not None,
        )

    def _bucket(self, step: StepInput, exact: FrameShape) -> FrameShape | None:
        """Room for many steps like this one: few rows, no images. None for any other.

        On a CPU room costs time: only bounds are rounded up, sequences have few rows, none or all may close a group.
        """
        if exact.images or exact.window_width > self._text.sliding_window or exact.rows > GPU_ROWS[-1]:
            return None
        if self._device.type == "cpu":
            few = exact.rows == exact.sequences or int((step.stop_S - step.start_S).max()) <= _MAX_ROWS_EACH
            if not few or exact.rows > MAX_ROWS:
                return None
            return replace(
                exact,
                window_width=self._text.sliding_window,
                closing=tuple((ratio, count and exact.rows) for ratio, count in exact.closing),
                visible=tuple((ratio, self._rounded(ratio, most)) for ratio, most in exact.visible),
            )
        rows = next(rows for rows in GPU_ROWS if rows >= exact.rows)
        return self.gpu_shape(rows, self.levels(int(step.stop_S.max()))[-1], dict(exact.table_widths), exact.adapters)

    def levels(self, tokens: int) -> list[int]:
        """Bounds of context lengths up to the one that holds `tokens`; the model's own limit is the last."""
        last = (((tokens - 1) // _GPU_TOKENS).bit_length() + 1) // 2
        return [min(_GPU_TOKENS * 4**n, max(tokens, self._text.max_position_embeddings)) for n in range(last + 1)]

    def gpu_shape(self, rows: int, tokens: int, table_widths: Mapping[str, int], adapters: bool) -> FrameShape:
        """The bucket of `rows` rows of sequences up to `tokens` tokens."""
        return FrameShape(
            rows=rows,
            sequences=rows,
            logit_rows=rows,
            window_width=self._text.sliding_window,
            closing=tuple((ratio, rows) for ratio in self._compressors),
            visible=tuple((ratio, tokens // ratio) for ratio in self._compressors),
            table_widths=tuple((group, self._width(group, width, tokens)) for group, width in table_widths.items()),
            adapters=adapters,
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

    def fill(self, values: StepValues) -> None:
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
