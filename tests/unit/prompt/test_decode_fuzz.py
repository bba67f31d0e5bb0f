"""Damaged files, whatever the damage: a picture or a PromptError, nothing else."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from spyglass.errors import PromptError
from spyglass.prompt import CHAT_RULES, REFERENCE_RULES, ImageRules, patchify, plan_image
from spyglass.prompt.decode import ImageInput, ImageLimits, open_image, oriented_size
from tests.released import V4_VISION, V41_VISION
from tests.unit.prompt.pictures import encode, noise

SMALL = ImageLimits(pixels=1 << 16)
RULES = st.sampled_from([REFERENCE_RULES, CHAT_RULES, ImageRules(alpha="white"), ImageRules(samples="scale")])


def files() -> dict[str, bytes]:
    image = noise(23, 17)
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "a picture"
    palette = image.quantize(20)
    wide = image.convert("L").convert("I").convert("I;16")
    made = {
        "jpeg": encode(image, "JPEG", exif=exif),
        "progressive": encode(image, "JPEG", progressive=True),
        "cmyk": encode(image.convert("CMYK"), "JPEG"),
        "png": encode(image, "PNG", exif=exif),
        "alpha": encode(image.convert("RGBA"), "PNG"),
        "palette": encode(palette, "PNG", transparency=bytes(range(20))),
        "wide": encode(wide, "PNG"),
        "bits": encode(image.convert("1"), "PNG"),
        "webp": encode(image, "WEBP", exif=exif),
        "lossless": encode(image.convert("RGBA"), "WEBP", lossless=True),
        "gif": encode(palette, "GIF", transparency=3),
        "animation": encode(palette, "GIF", save_all=True, append_images=[noise(23, 17).quantize(9)]),
        "bmp": encode(image, "BMP"),
        "palette bmp": encode(palette, "BMP"),
        "tiff": encode(image, "TIFF", tiffinfo={274: 6}),
        "lzw": encode(image, "TIFF", compression="tiff_lzw"),
        "fax": encode(image.convert("1"), "TIFF", compression="group4"),
        "float": encode(image.convert("F"), "TIFF"),
        "lab": encode(image.convert("LAB"), "TIFF"),
    }
    return made


FILES = files()


def survives(data: ImageInput, rules: ImageRules) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoders remark on damage that they read past
        try:
            picture = open_image(data, limits=SMALL)
            for vision in (V4_VISION, V41_VISION):
                plan = plan_image(*oriented_size(picture, rules), vision)
                patches = patchify(picture, plan, rules=rules)
                assert patches.shape == (plan.vit_grid[0] * plan.vit_grid[1], 3, 14, 14)
        except PromptError as error:
            assert str(error)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=40)
@given(data=st.data())
def test_damaged_files_are_pictures_or_prompt_errors(name: str, data: st.DataObject) -> None:
    damaged = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.sampled_from(["set", "cut", "drop", "repeat"])):
            case "set":
                damaged[at] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[max(at, 1) :]
            case "drop":
                del damaged[at : min(at + data.draw(st.integers(1, 9)), len(damaged) - 1)]
            case "repeat":
                damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 9))]
    survives(bytes(damaged), data.draw(RULES))


@pytest.mark.parametrize("head", [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b"II*\0", b"RIFF"])
@settings(max_examples=40)
@given(tail=st.binary(max_size=200), rules=RULES)
def test_noise_behind_any_signature_is_a_prompt_error(head: bytes, tail: bytes, rules: ImageRules) -> None:
    survives(head + tail, rules)
