"""Packing pictures: the packed layout, and every way the counts can disagree."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spyglass.batch.images import check_images, num_cells, pack_images
from spyglass.errors import PromptError
from spyglass.vision.pixels import pixel_table
from tests.vision_parts import SMALL as V4


def pixels(grid: tuple[int, int], seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (grid[0] * grid[1], 3, 14, 14), dtype=np.uint8)


def test_pictures_lie_one_after_the_other_as_pixels() -> None:
    grids = [(2, 3), (1, 1), (4, 2)]
    patches = [pixels(grid, seed) for seed, grid in enumerate(grids)]
    packed = pack_images(patches, grids, V4, adapter_ids=[2, 0, 1])
    assert packed.patches_U.dtype == torch.uint8
    assert np.array_equal(packed.patches_U.numpy(), np.concatenate(patches))
    assert packed.cu_seqlens_I1.tolist() == [0, 6, 7, 15] and packed.cu_seqlens_I1.dtype == torch.int32
    assert packed.grids_I2 == ((2, 3), (1, 1), (4, 2))
    assert packed.adapter_I.tolist() == [2, 0, 1] and packed.adapter_I.dtype == torch.int32


def test_pixels_beside_floats_are_normalised() -> None:
    floats = np.random.default_rng(1).normal(size=(4, 3, 14, 14)).astype(np.float32)
    packed = pack_images([pixels((1, 2)), floats], [(1, 2), (2, 2)], V4)
    assert packed.patches_U.dtype == torch.float32
    assert torch.equal(packed.patches_U[:2], pixel_table()[torch.from_numpy(pixels((1, 2))).long()])
    assert np.array_equal(packed.patches_U[2:].numpy(), floats)


def test_read_only_and_strided_arrays_and_tensors_are_accepted() -> None:
    frozen = pixels((2, 2))
    frozen.setflags(write=False)
    strided = np.repeat(pixels((2, 2), 1), 2, axis=0)[::2]
    packed = pack_images([frozen, strided, torch.from_numpy(pixels((1, 1), 2))], [(2, 2), (2, 2), (1, 1)], V4)
    assert np.array_equal(packed.patches_U.numpy(), np.concatenate([frozen, strided, pixels((1, 1), 2)]))


def test_no_picture_is_an_empty_batch() -> None:
    packed = pack_images([], [], V4)
    assert packed.patches_U.shape == (0, 3, 14, 14) and packed.cu_seqlens_I1.tolist() == [0] and packed.grids_I2 == ()


@pytest.mark.parametrize(("grid", "cells"), [((1, 1), 1), ((3, 3), 1), ((3, 4), 2), ((35, 46), 192), ((7, 9), 9)])
def test_cells_are_padded_to_whole_ones(grid: tuple[int, int], cells: int) -> None:
    assert num_cells(grid, 3) == cells


# 448x448, 640x480 and 1x1 on V4.1 make 1521 + 1610 + 1521 patches and 169 + 192 + 169 image positions.
REPORT = dataclasses.replace(V4, layout="reading", max_tokens=1024)
GRIDS = [(39, 39), (35, 46), (39, 39)]


def report_patches() -> list[NDArray[np.uint8]]:
    return [np.zeros((rows * columns, 3, 14, 14), np.uint8) for rows, columns in GRIDS]


def test_the_untampered_batch_of_field_report_25_packs() -> None:
    check_images(report_patches(), GRIDS, [169, 192, 169], REPORT)
    packed = pack_images(report_patches(), GRIDS, REPORT)
    assert packed.patches_U.shape[0] == 4652


@pytest.mark.parametrize("picture", [0, 1, 2])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_dropped_or_added_patch_names_the_picture_and_both_counts(picture: int, change: int) -> None:
    patches = report_patches()
    expected = len(patches[picture])
    patches[picture] = np.resize(patches[picture], (expected + change, 3, 14, 14))
    with pytest.raises(PromptError, match=rf"image {picture}: .*needs {expected} patches, {expected + change} were"):
        check_images(patches, GRIDS, [169, 192, 169], REPORT)


@pytest.mark.parametrize("picture", [0, 1, 2])
@pytest.mark.parametrize("change", [-1, 1])
def test_image_positions_that_do_not_fit_the_grid_name_the_picture(picture: int, change: int) -> None:
    positions = [169, 192, 169]
    positions[picture] += change
    with pytest.raises(
        PromptError, match=rf"image {picture}: {positions[picture]} image positions .* gives 1\d\d rows"
    ):
        check_images(report_patches(), GRIDS, positions, REPORT)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_picture_in_any_of_the_lists_is_refused(lost: int) -> None:
    lists: list[list[object]] = [list(report_patches()), list(GRIDS), [169, 192, 169]]
    del lists[lost][-1]
    with pytest.raises(PromptError, match="image 2 is missing"):
        check_images(*lists, REPORT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("patches", "grid", "message"),
    [
        (np.zeros((1, 14, 14, 3), np.uint8), (1, 1), r"image 0: .*shape \[1, 14, 14, 3\]; expected \[N, 3, 14, 14\]"),
        (np.zeros((1, 3, 14, 14), np.int64), (1, 1), r"image 0: patches are int64; give uint8 pixels or floats"),
        (np.zeros((1, 3, 14, 14), bool), (1, 1), r"image 0: patches are bool"),
        (np.zeros((0, 3, 14, 14), np.uint8), (0, 5), r"image 0: its grid is 0 x 5 patches; both must be at least 1"),
        (np.zeros((1, 3, 14, 14), np.uint8), (-1, -1), r"image 0: its grid is -1 x -1"),
    ],
)
def test_patches_of_another_shape_or_kind_are_refused(
    patches: NDArray[np.generic], grid: tuple[int, int], message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        check_images([patches], [grid], [1], V4)
