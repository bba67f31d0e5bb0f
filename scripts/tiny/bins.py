"""Training steps of one fixed shape, so that a whole step can be captured once and replayed (and compiled without
dynamic shapes).

Sequences are laid into bins of equal length, several a bin, each bin filled up with a sequence of padding tokens that
nobody sees and nothing is learned from. So packed row t is place t % length of bin t // length: attention becomes
dense over a bin with a mask, and memory pages are views. Images follow one another up to a fixed number of patches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from scripts.tiny.cell_loss import cell_places
from spyglass.batch.types import Batch, CacheView, CompressionStep
from spyglass.config.model import EngramConfig, ModelConfig, TextConfig
from spyglass.engram import hash_constants, row_ids
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.runtime.frame import Frames
from spyglass.runtime.step_input import join_inputs
from spyglass.train.loss import IGNORED
from spyglass.train.packing import Sample, Tables, fresh_pages, sequence_steps
from spyglass.vision.aligner import cell_index, gather_cells
from spyglass.vision.tower import PackedRows, patch_positions

Arrays = dict[str, NDArray[Any]]
LENGTH = 1152  # of a bin: a question with two tools
BINS = 18
_PAD = np.int32(0)  # any id: a padding row is seen by no other and predicts nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The fixed shape. `length` is a multiple of every ratio; a sequence longer than it, or with more than
    `largest_picture` patches, does not fit."""

    bins: int
    length: int
    patches: int
    cells: int
    images: int
    largest_image: int
    targets: int

    @property
    def rows(self) -> int:
        return self.bins * self.length


def capacity_of(bins: int, length: int = LENGTH) -> Capacity:
    """The shape of a step of so many bins of `length` tokens: a question has about a hundred, one with tools more than
    nine hundred."""
    share = bins * length / (BINS * LENGTH)
    return Capacity(
        bins=bins,
        length=length,
        patches=round(77824 * share),
        cells=round(9728 * share),
        images=round(240 * share),
        largest_image=1800,
        targets=round(4096 * share),
    )


@dataclass(slots=True, kw_only=True)
class Filling:
    """Samples on their way into one step, first fit; `add` refuses what has no room."""

    capacity: Capacity
    bins: list[list[Sample]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    patches: int = 0
    cells: int = 0
    images: int = 0
    targets: int = 0

    def add(self, sample: Sample) -> bool:
        """Take the sample if every budget has room for it."""
        prompt, most = sample.prompt, self.capacity
        patches = [len(pixels) for pixels in prompt.patches]
        if max(patches, default=0) > most.largest_image:
            return False
        totals = (
            (self.patches + sum(patches), most.patches),
            (self.cells + sum(len(span.order) for span in prompt.spans), most.cells),
            (self.images + len(patches), most.images),
            (self.targets + len(sample.rows), most.targets),
        )
        place = next((n for n, used in enumerate(self.used) if used + len(prompt) <= most.length), len(self.bins))
        if place >= most.bins or len(prompt) > most.length or any(now > limit for now, limit in totals):
            return False
        if place == len(self.bins):
            self.bins.append([])
            self.used.append(0)
        self.bins[place].append(sample)
        self.used[place] += len(prompt)
        (self.patches, self.cells, self.images, self.targets) = (now for now, _ in totals)
        return True


def lay_out(
    filling: Filling,
    config: ModelConfig,
    classes_V: NDArray[np.int32] | None = None,
    patches_U: NDArray[np.uint8] | None = None,
) -> Arrays:
    """The step as host arrays of fixed shape, what `device_step` and its neighbours take.

    `classes_V`: the compressed vocabulary of a model with memory tables. `patches_U` is where the patches are written,
    by far the most bytes; None = fresh memory.
    """
    capacity, text = filling.capacity, config.text
    bins = [*filling.bins, *([] for _ in range(capacity.bins - len(filling.bins)))]
    whole = [_filled(samples, capacity.length) for samples in bins]
    samples = [sample for group in whole for sample in group]
    real = [n < len(group) for group, filled in zip(bins, whole, strict=True) for n in range(len(filled))]
    lengths = np.array([len(sample.prompt) for sample in samples])
    tables, entries = _places(whole, text, capacity.length)
    steps = sequence_steps(samples, tables, text, adapter_id=0)
    frame = Frames(text, dict.fromkeys(tables[0], 1)).exact(join_inputs(steps), {})
    batch, cache = frame.batch, frame.cache
    out: Arrays = {
        "ids_T": batch.ids_T.numpy(),
        "kinds_T": batch.kinds_T.numpy(),
        "positions_T": batch.positions_T.numpy(),
        "seq_T": batch.seq_T.numpy(),
        "lo_T": batch.window_lo_T.numpy(),
        "hi_T": batch.window_hi_T.numpy(),
        "real_T": np.repeat(real, lengths),
        "image_index_T": np.full(capacity.rows, -1, np.int32)
        if batch.image_index_T is None
        else batch.image_index_T.numpy(),
        "logit_rows_R": _padded(batch.logit_rows_R.numpy().astype(np.int32), capacity.targets, 0),
        "targets_R": _padded(np.concatenate([s.targets for s in samples]).astype(np.int32), capacity.targets, IGNORED),
    }
    for ratio, pool in cache.compression.items():
        count, write_P = capacity.bins * (capacity.length // ratio), pool.write_P.numpy()
        for name, values, default in (
            ("sources_PB", pool.sources_PB.numpy(), 0),
            ("positions_P", pool.positions_P.numpy(), 0),
            ("entry_seq_P", entries[ratio][0], -1),
            ("entry_P", entries[ratio][1], 0),
        ):
            place = np.full((count, *values.shape[1:]), default, np.int32)
            place[write_P] = values
            out[f"{name}{ratio}"] = place
    if classes_V is not None and text.engram is not None:
        out |= _memory_rows(out, text.engram, classes_V)
    return out | _images([sample.prompt for sample in samples], config, capacity, patches_U)


def _memory_rows(arrays: Arrays, engram: EngramConfig, classes_V: NDArray[np.int32]) -> Arrays:
    """`engram_TJ<layer>`: the table rows of every token."""
    starts = np.flatnonzero(np.diff(arrays["seq_T"], prepend=-1, append=-1)).astype(np.int32)
    rows = row_ids(
        arrays["ids_T"].astype(np.int32),
        arrays["kinds_T"].astype(np.int8),
        np.full((len(starts) - 1, engram.lookback), -1, np.int32),
        starts,
        classes_V=classes_V,
        pad_token_id=engram.pad_token_id,
        constants=hash_constants(engram),
    )
    return {f"engram_TJ{layer}": values.astype(np.int32) for layer, values in rows.items()}


def _filled(samples: Sequence[Sample], length: int) -> list[Sample]:
    """A bin's samples and one of padding that fills it."""
    rest = length - sum(len(sample.prompt) for sample in samples)
    if rest == 0:
        return list(samples)
    prompt = Prompt(
        ids_T=np.full(rest, _PAD, np.int32),
        kinds_T=np.full(rest, TokenKind.TEXT, np.int8),
        spans=(),
        image_row_T=np.full(rest, -1, np.int32),
        visible_T2=np.zeros((rest, 2), np.int32),
        patches=(),
        plans=(),
        digests=(),
    )
    return [*samples, Sample(prompt=prompt, learn_T=np.zeros(rest, np.bool_))]


def _places(
    bins: Sequence[Sequence[Sample]], text: TextConfig, length: int
) -> tuple[list[Tables], dict[int, tuple[NDArray[np.int32], NDArray[np.int32]]]]:
    """Page of every row of every sequence, one row a page; and of every entry, its sequence and number, by ratio."""
    ratios = ratios_of(text)
    tables: list[Tables] = []
    seqs: dict[int, list[NDArray[np.int32]]] = {ratio: [] for ratio in ratios}
    numbers: dict[int, list[NDArray[np.int32]]] = {ratio: [] for ratio in ratios}
    for index, group in enumerate(bins):
        first = index * length
        taken = {ratio: index * (length // ratio) for ratio in ratios}
        for sample in group:
            count = len(sample.prompt)
            table: Tables = {"window": np.arange(first, first + count, dtype=np.int32)}
            for ratio in ratios:
                entries = count // ratio
                table[f"state{ratio}"] = table["window"]
                table[f"pool{ratio}"] = np.arange(taken[ratio], taken[ratio] + entries, dtype=np.int32)
                seqs[ratio].append(np.full(entries, len(tables), np.int32))
                numbers[ratio].append(np.arange(entries, dtype=np.int32))
                taken[ratio] += entries
            tables.append(table)
            first += count
    return tables, {ratio: (np.concatenate(seqs[ratio]), np.concatenate(numbers[ratio])) for ratio in ratios}


def _images(
    prompts: Sequence[Prompt], config: ModelConfig, capacity: Capacity, patches_U: NDArray[np.uint8] | None
) -> Arrays:
    """Patches one image after another, unused ones as images of their own that no cell reads."""
    vision = config.vision
    if vision is None:
        return {}
    pixels = [patches.reshape(len(patches), -1) for prompt in prompts for patches in prompt.patches]
    grids = [plan.vit_grid for prompt in prompts for plan in prompt.plans]
    counts = [len(patches) for patches in pixels]
    spare = capacity.patches - sum(counts)
    counts += [min(capacity.largest_image, spare - n) for n in range(0, spare, capacity.largest_image)]
    most = capacity.images + -(-capacity.patches // capacity.largest_image)
    borders = np.cumsum([0, *counts], dtype=np.int32)
    row_U, column_U = (part.numpy().astype(np.int16) for part in patch_positions(grids))
    if patches_U is None:
        patches_U = np.empty((capacity.patches, 3 * vision.patch_size**2), np.uint8)
    np.concatenate([patches_U[:0], *pixels], out=patches_U[: len(row_U)])
    patches_U[len(row_U) :] = 0
    return {
        "patches_U": patches_U,
        "row_U": _padded(row_U, capacity.patches, 0),
        "column_U": _padded(column_U, capacity.patches, 0),
        "borders_I1": _padded(borders, most + 1, capacity.patches),
        "cells_I": _padded(cell_index(grids, vision.downsample_ratio).astype(np.int32), capacity.cells, -1),
        "places_I2": _padded(cell_places(grids, vision.downsample_ratio), capacity.cells, IGNORED),
    }


def _padded(values: NDArray[np.generic], length: int, fill: int) -> NDArray[np.generic]:
    assert len(values) <= length, (len(values), length)
    out = np.full((length, *values.shape[1:]), fill, values.dtype)
    out[: len(values)] = values
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Which keys each row attends, bool: window rows of its own bin [bins, L, L], and entries of it by ratio."""

    window_BLL: torch.Tensor
    pool_BLP: Mapping[int, torch.Tensor]


def masks_of(tensors: Mapping[str, torch.Tensor], text: TextConfig, capacity: Capacity) -> Masks:
    """The masks of a step laid out by `lay_out`, from its device tensors."""
    shape = (capacity.bins, capacity.length)
    seq, lo, hi, position = (tensors[name].view(shape) for name in ("seq_T", "lo_T", "hi_T", "positions_T"))
    key = position[:, None]
    window = (seq[:, :, None] == seq[:, None]) & (key >= lo[:, :, None]) & (key <= hi[:, :, None])
    pools = {}
    for ratio in ratios_of(text):
        owner, entry = (tensors[f"{name}{ratio}"].view(capacity.bins, 1, -1) for name in ("entry_seq_P", "entry_P"))
        visible = (position + 1) // ratio
        pools[ratio] = (owner == seq[:, :, None]) & (entry < visible[:, :, None])
    return Masks(window_BLL=window, pool_BLP=pools)


def device_step(
    tensors: Mapping[str, torch.Tensor], text: TextConfig, capacity: Capacity, dtype: torch.dtype
) -> tuple[Batch, CacheView]:
    """Batch and cache of a step laid out by `lay_out`, from its device tensors; nothing is read back to the host.

    Tables and state rows are left out: the ops of `dense_ops` find keys by their place in a bin.
    """
    ids_T, none = tensors["ids_T"], tensors["ids_T"].new_zeros(1)
    positions_T = tensors["positions_T"]
    rows = {"window": capacity.rows}
    pools = {}
    for ratio in ratios_of(text):
        count = capacity.bins * (capacity.length // ratio)
        rows[f"pool{ratio}"] = count
        pools[ratio] = CompressionStep(
            ratio=ratio,
            sources_PB=tensors[f"sources_PB{ratio}"],
            positions_P=tensors[f"positions_P{ratio}"],
            write_P=torch.arange(count, device=ids_T.device),
            phase_T=(positions_T % ratio).long(),
            state_write_T=None,
            visible_T=(positions_T + 1) // ratio,
            max_visible=capacity.length // ratio,
        )
    pages = fresh_pages(text, rows, ids_T.device, dtype)
    batch = Batch(
        ids_T=ids_T,
        kinds_T=tensors["kinds_T"],
        positions_T=positions_T,
        seq_T=tensors["seq_T"],
        window_lo_T=tensors["lo_T"],
        window_hi_T=tensors["hi_T"],
        window_width=capacity.length,
        image_index_T=tensors["image_index_T"] if "patches_U" in tensors else None,
        has_images="patches_U" in tensors,
        logit_rows_R=tensors["logit_rows_R"].long(),
    )
    tables = dict.fromkeys(rows, none[None])
    return batch, CacheView(
        pages=pages,
        table_SP=tables,
        window_write_T=torch.arange(capacity.rows, device=ids_T.device),
        compression=pools,
    )


def image_rows_of(
    tensors: Mapping[str, torch.Tensor], angles: tuple[torch.Tensor, torch.Tensor], offsets: tuple[int, ...]
) -> PackedRows:
    """What the tower needs besides patches. `angles` are `vision.tower.angle_tables` on the device.

    `offsets`: true borders for an attention that reads them on the host, else anything whose longest step is the
    largest image.
    """
    row_U, column_U = tensors["row_U"].int(), tensors["column_U"].int()
    cos_UR, sin_UR = (
        torch.cat([angle.index_select(0, row_U), angle.index_select(0, column_U)], dim=1) for angle in angles
    )
    return PackedRows(
        cos_UR=cos_UR, sin_UR=sin_UR, cu_seqlens_I1=tensors["borders_I1"], offsets=offsets, adapter_U=None
    )


class _Cells(torch.autograd.Function):
    """Patches into cells. Every patch is in one cell at most, so the gradient is a gather as well."""

    @staticmethod
    def forward(ctx: Any, rows_UY: torch.Tensor, cells_I: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cells_I)
        ctx.patches = len(rows_UY)
        return gather_cells(rows_UY, cells_I.long())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (cells_I,) = ctx.saved_tensors
        grad_NY = gradients[0].unflatten(1, (-1, cells_I.shape[1])).transpose(1, 2).flatten(0, 1)
        patch_N = cells_I.flatten().long()
        place_U = torch.full((ctx.patches + 1,), len(patch_N), device=patch_N.device)
        place_U.scatter_(
            0, torch.where(patch_N < 0, ctx.patches, patch_N), torch.arange(len(patch_N), device=patch_N.device)
        )
        padded_NY = torch.cat([grad_NY, grad_NY.new_zeros(1, grad_NY.shape[1])])
        return padded_NY.index_select(0, place_U[:-1]), None


def cells_of(rows_UY: torch.Tensor, cells_I: torch.Tensor) -> torch.Tensor:
    """Cells [I, Y · ratio²] of the tower's rows, as `vision.aligner.gather_cells`; -1 is a row of zeros."""
    out: torch.Tensor = _Cells.apply(rows_UY, cells_I)  # type: ignore[no-untyped-call]
    return out


def ratios_of(text: TextConfig) -> tuple[int, ...]:
    """Compression ratios of a backbone, ascending."""
    return tuple(sorted({plan.compressor.ratio for plan in text.layers if plan.compressor is not None}))
