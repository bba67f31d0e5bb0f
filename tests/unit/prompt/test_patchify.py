"""Patches against the straightforward pipeline: Pillow's own pad, float arithmetic, bf16, permute."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from spyglass.config import VisionConfig
from spyglass.errors import PromptError
from spyglass.prompt import (
    ImagePlan,
    normalisation_table,
    normalise,
    patchify,
    plan_image,
    prompt_digest,
)
from tests.released import V4_VISION, V41_VISION

FAMILIES = pytest.mark.parametrize("vision", [V4_VISION, V41_VISION], ids=["v4", "v41"])


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    bands = np.random.default_rng(width * 8192 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(bands).convert(mode)


def straightforward(image: Image.Image, plan: ImagePlan) -> tuple[NDArray[np.uint8], torch.Tensor]:
    """uint8 and bf16 patches the plain way."""
    rgb = image.convert("RGB")
    if plan.stretch:
        rgb = rgb.resize(plan.resized)
    else:
        rgb = ImageOps.pad(rgb, plan.resized, color=(127, 127, 127))
    pixels = torch.from_numpy(np.array(rgb)).permute(2, 0, 1)
    value = ((pixels.float() / 255 - 0.5) / 0.5).bfloat16()
    (rows, columns), patch = plan.vit_grid, plan.patch_size

    def cut(planes: torch.Tensor) -> torch.Tensor:
        grid = planes.reshape(3, rows, patch, columns, patch)
        return grid.permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, patch, patch).contiguous()

    return cut(pixels).numpy(), cut(value)


@FAMILIES
@settings(max_examples=25)
@given(width=st.integers(1, 700), height=st.integers(1, 700))
def test_patches_equal_the_straightforward_pipeline_bit_for_bit(vision: VisionConfig, width: int, height: int) -> None:
    image = noise(width, height)
    plan = plan_image(width, height, vision)
    patches = patchify(image, plan)
    pixels, values = straightforward(image, plan)
    np.testing.assert_array_equal(patches, pixels)
    np.testing.assert_array_equal(normalise(patches), values.view(torch.uint16).numpy())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"])
def test_every_mode_is_what_conversion_to_rgb_makes_of_it(mode: str) -> None:
    image = noise(61, 47).convert("P").convert(mode) if mode == "PA" else noise(61, 47, mode)
    plan = plan_image(61, 47, V4_VISION)
    np.testing.assert_array_equal(patchify(image, plan), straightforward(image, plan)[0])


def test_a_high_contrast_picture_is_resized_with_pillows_rounding_between_passes() -> None:
    cells = np.indices((1024, 1024)).sum(0) % 2 * 255
    image = Image.fromarray(cells.astype(np.uint8)).convert("RGB")
    plan = plan_image(1024, 1024, V4_VISION)
    assert plan.resized == (756, 756)
    resized = np.asarray(image.resize((756, 756), Image.Resampling.BICUBIC))
    rows = patchify(image, plan).reshape(54, 54, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(756, 756, 3)
    np.testing.assert_array_equal(rows, resized)


def test_a_pixel_is_one_of_256_bf16_values() -> None:
    table = normalisation_table()
    pixels = torch.arange(256, dtype=torch.uint8)
    expected = ((pixels.float() / 255 - 0.5) / 0.5).bfloat16()
    assert torch.equal(torch.from_numpy(table).bfloat16(), expected)
    assert torch.equal(torch.from_numpy(table), expected.float())
    assert (table[0], table[127], table[255]) == (-1.0, np.float32(-0.003936767578125), 1.0)


@given(st.integers(1, 40_000), st.integers(0, 2**32))
def test_normalising_is_a_look_up_for_any_number_of_pixels(count: int, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    bits = normalise(pixels)
    assert bits.shape == pixels.shape
    np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), normalisation_table()[pixels])


def test_what_is_not_picture_is_grey_127_and_lies_evenly_around() -> None:
    plan = plan_image(100, 5000, V4_VISION)
    patches = patchify(Image.new("RGB", (100, 5000), (255, 0, 0)), plan)
    columns = patches.reshape(300, 6, 3, 14, 14).transpose(1, 4, 0, 3, 2).reshape(84, 4200, 3)
    assert plan.resized == (84, 4200)
    assert [tuple(columns[x, 0]) for x in (0, 83)] == [(255, 0, 0)] * 2
    wide = plan_image(700, 101, V4_VISION)
    inner = round(101 / 700 * wide.resized[0])
    top = round((wide.resized[1] - inner) * 0.5)
    assert top > 0
    pixels = patchify(Image.new("RGB", (700, 101)), wide)
    column = pixels.reshape(*wide.vit_grid, 3, 14, 14)[:, 0, 0, :, 0].reshape(-1)
    np.testing.assert_array_equal(column == 127, [not top <= y < top + inner for y in range(wide.resized[1])])


def test_a_patch_is_channel_major_and_patches_go_row_by_row() -> None:
    pixels = np.zeros((28, 42, 3), np.uint8)
    pixels[15, 31] = (1, 2, 3)
    plan = ImagePlan(resized=(42, 28), vit_grid=(2, 3), llm_grid=(1, 1), num_tokens=6, stretch=False, patch_size=14)
    patches = patchify(Image.fromarray(pixels), plan)
    assert patches.dtype == np.uint8
    assert patches.shape == (6, 3, 14, 14)
    flat = patches.reshape(6, 588)
    assert np.argwhere(flat).tolist() == [[5, c * 196 + 1 * 14 + 3] for c in range(3)]


def test_other_patch_sizes_are_cut_too() -> None:
    vision = dataclasses.replace(V4_VISION, patch_size=7, min_pixels=500)
    image = noise(50, 33)
    plan = plan_image(50, 33, vision)
    pixels, values = straightforward(image, plan)
    patches = patchify(image, plan)
    np.testing.assert_array_equal(patches, pixels)
    np.testing.assert_array_equal(normalise(patches), values.view(torch.uint16).numpy())


def test_bytes_paths_and_pictures_give_the_same(tmp_path: object) -> None:
    image = noise(90, 70)
    stored = io.BytesIO()
    image.save(stored, "PNG")
    path = f"{tmp_path}/a.dat"
    with open(path, "wb") as file:
        file.write(stored.getvalue())
    plan = plan_image(90, 70, V4_VISION)
    expected = patchify(image, plan)
    for source in (stored.getvalue(), bytearray(stored.getvalue()), memoryview(stored.getvalue()), path):
        np.testing.assert_array_equal(patchify(source, plan), expected)


def test_the_callers_picture_is_left_as_it_was() -> None:
    image = noise(40, 30).quantize(16)
    image.info["transparency"] = bytes(16)
    before = (image.mode, image.tobytes(), dict(image.info))
    patchify(image, plan_image(40, 30, V4_VISION))
    assert (image.mode, image.tobytes(), dict(image.info)) == before


def test_a_picture_too_thin_for_its_plan_is_refused() -> None:
    with pytest.raises(PromptError, match="too thin"):
        patchify(Image.new("RGB", (1, 16_000)), plan_image(1, 15_000, V4_VISION))


def test_digests_tell_pixels_types_and_plans_apart() -> None:
    plan = plan_image(90, 70, V4_VISION)
    pixels = patchify(noise(90, 70), plan)
    last_row = pixels.copy()
    last_row[-1, -1, -1, -1] ^= 1
    changes = {"resized": (5, 6), "vit_grid": (1, 2), "llm_grid": (3, 4), "num_tokens": 7, "stretch": True}
    changes["patch_size"] = 8
    assert changes.keys() == {field.name for field in dataclasses.fields(plan)}
    others = {
        prompt_digest(last_row, plan),
        prompt_digest(pixels.astype(np.float32), plan),
        prompt_digest(pixels.view(np.int8), plan),
        prompt_digest(pixels.reshape(-1, 3, 28, 7), plan),
        *(prompt_digest(pixels, dataclasses.replace(plan, **{name: value})) for name, value in changes.items()),
    }
    assert len(others) == 4 + len(changes)
    assert prompt_digest(pixels, plan) not in others
    assert prompt_digest(np.asfortranarray(pixels), plan) == prompt_digest(pixels.copy(), plan)
