"""Prompts from parts: positions, spans, rows, digests, and everything that is refused with the picture's number."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from spyglass.config import ModelConfig
from spyglass.errors import PromptError
from spyglass.prompt import (
    IMAGE_POSITION,
    ImageLimits,
    ImageRules,
    Patches,
    TokenKind,
    layout_block,
    patchify,
    plan_image,
    prompt_digest,
    prompt_from_parts,
    to_rgb,
)
from tests.unit.prompt.pictures import encode, noise, png

SHAPES = st.lists(st.integers(0, 9) | st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


def patches(rows: int, columns: int, fill: int = 0) -> Patches:
    return Patches(np.full((rows * columns, 3, 14, 14), fill, np.uint8), (rows, columns))


@pytest.mark.parametrize("family", ["v4", "v41"])
@given(shape=SHAPES)
def test_parts_follow_one_another_and_every_picture_stands_where_it_was_laid_out(
    request: pytest.FixtureRequest, family: str, shape: list[int | tuple[int, int]]
) -> None:
    config: ModelConfig = request.getfixturevalue(family)
    assert config.vision is not None
    prompt = prompt_from_parts([[5], *([7] * s if isinstance(s, int) else patches(*s) for s in shape)], config)
    position, rows, number = 1, 0, 0
    for part in shape:
        if isinstance(part, int):
            assert (prompt.ids_T[position : position + part] == 7).all()
            assert (prompt.kinds_T[position : position + part] == TokenKind.TEXT).all()
            assert (prompt.image_row_T[position : position + part] == -1).all()
            position += part
            continue
        span, plan = prompt.spans[number], prompt.plans[number]
        expected = layout_block(plan, position, config.vision, number)
        assert (span.image, span.start, span.lead) == (number, position, expected.lead)
        here = slice(position, position + span.length)
        np.testing.assert_array_equal(prompt.kinds_T[here], expected.kinds)
        assert (prompt.ids_T[here] == IMAGE_POSITION).all()
        image_rows = prompt.image_row_T[here]
        np.testing.assert_array_equal(image_rows[expected.kinds == TokenKind.IMAGE], expected.order + rows)
        assert (image_rows[expected.kinds != TokenKind.IMAGE] == -1).all()
        position, rows, number = position + span.length, rows + plan.llm_grid[0] * plan.llm_grid[1], number + 1
    assert len(prompt) == position
    assert len(prompt.spans) == len(prompt.patches) == len(prompt.plans) == len(prompt.digests) == number
    dtypes = [prompt.ids_T.dtype, prompt.kinds_T.dtype, prompt.image_row_T.dtype, prompt.visible_T2.dtype]
    assert dtypes == [np.int32, np.int8, np.int32, np.int32]


def test_ids_may_be_any_flat_list_of_integers(v4: ModelConfig) -> None:
    flat: list[Any] = [[3, 4], (3, 4), range(3, 5), np.array([3, 4]), np.array([3, 4], np.uint16), torch.tensor([3, 4])]
    for form in flat:
        assert prompt_from_parts([form], v4).ids_T.tolist() == [3, 4]
    assert prompt_from_parts([[], [3]], v4).ids_T.tolist() == [3]


def test_the_same_photo_takes_longer_blocks_after_other_prefixes(v4: ModelConfig, v41: ModelConfig) -> None:
    photo = noise(560, 266)
    lengths = [len(prompt_from_parts([[5] * start, photo], v4)) - start for start in range(4)]
    assert lengths == [125, 124, 123, 122]
    assert [len(prompt_from_parts([[5] * start, photo], v41)) - start for start in range(4)] == [182] * 4
    digests = {prompt_from_parts([[5] * start, photo], v4).digests for start in range(4)}
    assert len(digests) == 1


def test_three_pictures_have_the_reported_totals(v41: ModelConfig) -> None:
    prompt = prompt_from_parts([noise(448, 448), noise(640, 480), noise(1, 1)], v41)
    assert [plan.num_tokens for plan in prompt.plans] == [184, 206, 184]
    assert [len(pixels) for pixels in prompt.patches] == [1521, 1610, 1521]
    assert len(prompt) == 574


@pytest.mark.parametrize(("size", "in_v4", "in_v41"), [((1, 1), 114, 184), ((2, 2), 114, 184), ((14, 14), 114, 184)])
def test_pictures_smaller_than_a_patch_are_pictures(
    v4: ModelConfig, v41: ModelConfig, size: tuple[int, int], in_v4: int, in_v41: int
) -> None:
    assert len(prompt_from_parts([[5] * 3, noise(*size)], v4)) - 3 == in_v4
    assert len(prompt_from_parts([noise(*size)], v41)) == in_v41
    assert len(prompt_from_parts([noise(27, 257)], v41)) == 242


def test_decoded_pictures_carry_the_pixels_of_patchify(v4: ModelConfig, tmp_path: Path) -> None:
    assert v4.vision is not None
    image = noise(300, 200)
    image.save(tmp_path / "a.png")
    plan = plan_image(300, 200, v4.vision)
    expected = patchify(image, plan)
    url = f"{tmp_path}/a.png"
    for source in (image, tmp_path / "a.png", url, (tmp_path / "a.png").read_bytes()):
        prompt = prompt_from_parts([source], v4)
        np.testing.assert_array_equal(prompt.patches[0], expected)
        assert prompt.plans == (plan,)
        assert prompt.digests == (prompt_digest(expected, plan),)


def test_pictures_that_differ_in_the_last_row_only_have_other_digests(v4: ModelConfig) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (2000, 2000, 3), dtype=np.uint8)
    files = []
    for last_row in (255, 0):
        pixels[-1] = last_row
        files.append(encode(Image.fromarray(pixels), "PNG", compress_level=0))
    assert files[0][: 64 << 10] == files[1][: 64 << 10]
    assert files[0] != files[1]
    one, other = (prompt_from_parts([file], v4).digests[0] for file in files)
    assert one != other


def test_stored_and_upright_are_both_to_be_had(v4: ModelConfig) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    photo = encode(noise(640, 480), "PNG", exif=exif)
    assert prompt_from_parts([photo], v4).plans[0].num_tokens == 206
    assert prompt_from_parts([photo], v4, rules=ImageRules(exif="upright")).plans[0].num_tokens == 210


def test_cut_pictures_keep_their_values(v4: ModelConfig) -> None:
    values = np.random.default_rng(0).standard_normal((108, 3, 14, 14))
    for form in (values, values.astype(np.float32), torch.from_numpy(values)):
        prompt = prompt_from_parts([Patches(form, (9, 12))], v4)
        assert prompt.patches[0].dtype == np.float32
        np.testing.assert_array_equal(prompt.patches[0], values.astype(np.float32))
        assert prompt.plans[0].llm_grid == (3, 4)
    alike = SimpleNamespace(pixels=np.zeros((4, 3, 14, 14), np.uint8), vit_grid=(2, 2))
    assert prompt_from_parts([alike], v4).patches[0].dtype == np.uint8


NAN = np.full((4, 3, 14, 14), 0.5, np.float32)
NAN[2, 1, 3, 3] = np.nan
BROKEN_PATCHES: list[tuple[Any, Any, str]] = [
    (np.zeros((3, 3, 14, 14), np.uint8), (2, 2), r"image 1: patches of shape \[3, 3, 14, 14\], a grid of 2x2 needs"),
    (np.zeros((5, 3, 14, 14), np.uint8), (2, 2), r"image 1: patches of shape \[5"),
    (np.zeros((4, 588), np.uint8), (2, 2), r"image 1: patches of shape \[4, 588\]"),
    (np.zeros((4, 3, 16, 16), np.uint8), (2, 2), r"image 1: patches of shape \[4, 3, 16, 16\]"),
    (np.zeros((4, 3, 14, 14), np.int64), (2, 2), "image 1: patches are int64"),
    (np.zeros((4, 3, 14, 14), bool), (2, 2), "image 1: patches are bool"),
    (NAN, (2, 2), "image 1: patch 2 holds a value that is not finite"),
    (np.full((4, 3, 14, 14), 1e300), (2, 2), "image 1: patch 0 holds a value that is not finite in fp32"),
    (np.zeros((0, 3, 14, 14), np.uint8), (0, 0), "image 1: patch rows must be between"),
    (np.zeros((4, 3, 14, 14), np.uint8), (2, 2, 1), "image 1: patches need an array"),
    (np.zeros((4, 3, 14, 14), np.uint8), None, "image 1: patches need an array"),
    (torch.zeros((4, 3, 14, 14), dtype=torch.bfloat16), (2, 2), "image 1: patches need an array"),
    (np.zeros((1, 3, 14, 14), np.uint8), (90, 90), "image 1: a grid of 90x90 patches needs"),
]  # fmt: skip


@pytest.mark.parametrize(("pixels", "grid", "message"), BROKEN_PATCHES)
def test_patches_that_do_not_fit_their_grid_are_refused(v4: ModelConfig, pixels: Any, grid: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        prompt_from_parts([[1], patches(2, 2), Patches(pixels, grid)], v4)


BROKEN_IDS: list[tuple[Any, str]] = [
    ([1, -1], r"part 0: id -1 is outside the vocabulary 0\.\.129279 \(index 1\)"),
    ([129_285], "id 129285 is outside the vocabulary"),
    ([5, 6, 129_280], r"id 129280 is an image role \(vocabulary size 129280 \+ START\).*\(index 2\)"),
    ([129_284], r"\+ END\)"),
    ([1.0], "neither a flat list of integer token ids nor an image"),
    ([[1, 2]], "neither a flat list"),
    (7, "part 0 is a int that is neither"),
    ([True], "neither a flat list"),
    ([2**70], "neither a flat list"),
    (["a"], "neither a flat list"),
    ([[1], [2, 3]], "part 0 is neither a list"),
    (None, "neither a flat list"),
]


@pytest.mark.parametrize(("part", "message"), BROKEN_IDS)
def test_ids_that_are_no_text_are_refused(v4: ModelConfig, part: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        prompt_from_parts([part], v4)


def test_an_unexpanded_placeholder_or_an_expanded_span_is_refused_with_the_form_that_is_wanted(
    v4: ModelConfig, v41: ModelConfig
) -> None:
    for ids in ([5, 129_264], [129_264] * 184):
        with pytest.raises(PromptError, match=r"129264 .* is the image placeholder; leave it out and give"):
            prompt_from_parts([ids], v41)
        with pytest.raises(PromptError, match="is the image placeholder"):
            prompt_from_parts([ids], v4, placeholder=129_264)
    without_vision = dataclasses.replace(v41, vision=None)
    assert prompt_from_parts([[129_264]], without_vision).ids_T.tolist() == [129_264]


def test_an_empty_prompt_is_refused(v4: ModelConfig) -> None:
    for parts in ([], [[]], [[], []]):
        with pytest.raises(PromptError, match="the prompt is empty"):
            prompt_from_parts(parts, v4)


def test_a_model_without_vision_takes_no_images(text_only: ModelConfig) -> None:
    for picture in (noise(9, 9), patches(2, 2)):
        with pytest.raises(PromptError, match="image 0: this model takes no images"):
            prompt_from_parts([[1], picture], text_only)


def test_pictures_are_named_by_their_number(v4: ModelConfig) -> None:
    good = noise(30, 30)
    for bad, message in (
        (b"no picture", "image 2 is none of"),
        (encode(good, "PNG")[:60], "image 2 is a PNG that ends too early"),
        (Image.new("RGB", (1, 20_000)), "image 2: an image of 1x20000 pixels is too thin"),
    ):
        with pytest.raises(PromptError, match=message):
            prompt_from_parts([good, [1], good, bad], v4)


def test_a_picture_file_is_named_by_its_path(v4: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"^image 0 \(nowhere\.jpg\) cannot be read: No such file or directory$"):
        prompt_from_parts([[5], Path("nowhere.jpg")], v4)
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(PromptError, match=r"^image 0 \(.*notes\.txt\) is none of JPEG"):
        prompt_from_parts([tmp_path / "notes.txt"], v4)


def test_a_thin_picture_is_refused_before_it_is_unpacked(v4: ModelConfig) -> None:
    with pytest.raises(PromptError, match="1x20000 pixels is too thin"):
        prompt_from_parts([png(1, 20_000, 8, 0, b"damaged")], v4)


def test_a_crowd_of_pictures_has_smaller_sides(v4: ModelConfig) -> None:
    server = ImageLimits()
    wide, small = noise(4097, 2), noise(4, 4)
    assert len(prompt_from_parts([wide] * 14, v4, limits=server).spans) == 14
    with pytest.raises(PromptError, match="image 0 is 4097x2; from 15 images on a side may have 4096"):
        prompt_from_parts([wide] * 15, v4, limits=server)
    assert len(prompt_from_parts([small] * 15, v4, limits=server).spans) == 15


def test_pictures_are_counted_together(v4: ModelConfig) -> None:
    image = noise(30, 20)
    data = encode(image, "BMP")
    assert prompt_from_parts([data] * 3, v4, limits=ImageLimits(total_bytes=3 * len(data), images=3, total_pixels=1800))
    with pytest.raises(PromptError, match="image 2: the images together exceed"):
        prompt_from_parts([data] * 3, v4, limits=ImageLimits(total_bytes=3 * len(data) - 1))
    with pytest.raises(PromptError, match="image 2: the images together exceed 1799 pixels"):
        prompt_from_parts([data] * 3, v4, limits=ImageLimits(total_pixels=1799))


def test_nothing_is_unpacked_before_all_pictures_are_known_to_fit(
    v4: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[str] = []

    def noted(picture: Image.Image, rules: ImageRules, *, name: str) -> Image.Image:
        unpacked.append(name)
        return to_rgb(picture, rules, name=name)

    monkeypatch.setattr("spyglass.prompt.build.to_rgb", noted)
    data = encode(noise(30, 20), "PNG")
    for wrong in (ImageLimits(total_pixels=1799), ImageLimits(total_bytes=3 * len(data) - 1)):
        with pytest.raises(PromptError, match="together exceed"):
            prompt_from_parts([data] * 3, v4, limits=wrong)
    with pytest.raises(PromptError, match="image 2"):
        prompt_from_parts([data, data, b"no picture"], v4)
    assert not unpacked
    prompt_from_parts([data] * 3, v4)
    assert unpacked == ["image 0", "image 1", "image 2"]
    with pytest.raises(PromptError, match="the prompt has 3 images, the limit is 2"):
        prompt_from_parts([data] * 3, v4, limits=ImageLimits(images=2))


def test_a_header_that_lies_about_the_size_is_refused(v4: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    image = noise(30, 20)
    monkeypatch.setattr("spyglass.prompt.build.oriented_size", lambda picture, rules: (31, 20))
    with pytest.raises(PromptError, match="image 0 unpacks to 30x20, its header said 31x20"):
        prompt_from_parts([image], v4)
