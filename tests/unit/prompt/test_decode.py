"""Decoding: formats, modes, the rules where reference and wishes part, and everything that is refused by name."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spyglass.errors import PromptError
from spyglass.prompt import CHAT_RULES, REFERENCE_RULES, ImageLimits, ImageRules, open_image, oriented_size, to_rgb
from tests.unit.prompt.pictures import encode, noise, png, png_chunk

UPRIGHT = ImageRules(exif="upright")
WHITE = ImageRules(alpha="white")
SCALE = ImageRules(samples="scale")
# How an upright picture is stored so that the EXIF orientation turns it back.
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    """A decoder's warning is nothing that a user of ours can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def first_pixel(source: object, rules: ImageRules = REFERENCE_RULES) -> tuple[int, ...]:
    rgb = to_rgb(open_image(source), rules)
    assert rgb.mode == "RGB"
    pixel = rgb.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG", "AVIF"])
def test_formats_are_known_by_content(form: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    path = tmp_path / "picture.doc"
    path.write_bytes(encode(image, form))
    red, green, blue = first_pixel(path)
    assert (red > 250, green < 5, blue < 5) == (True, True, True)


@pytest.mark.parametrize("form", ["PPM", "ICO", "TGA", "PCX", "EPS"])
def test_other_formats_are_refused_with_the_ones_that_are_read(form: str) -> None:
    with pytest.raises(PromptError, match=r"image 3 is none of JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF .* begins with b"):
        open_image(encode(Image.new("RGB", (20, 10)), form), name="image 3")


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(frames[0], form, save_all=True, append_images=frames[1:], duration=100, **options)
    assert first_pixel(data) == (255, 0, 0)
    assert open_image(data).size == (64, 48)


def test_a_picture_that_stands_at_a_later_frame_is_that_frame() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime")]
    image = Image.open(io.BytesIO(encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)))
    image.seek(1)
    assert first_pixel(image) == (0, 255, 0)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "WEBP", "JPEG"])
def test_photos_are_turned_upright_where_the_rule_says_so(form: str, orientation: int) -> None:
    upright = Image.new("RGB", (48, 32), "black")
    upright.paste("white", (0, 0, 24, 8))  # a corner, so that every turn shows
    turn = STORED_AS.get(orientation)
    stored = upright if turn is None else upright.transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if form == "WEBP" else {"quality": 95}
    picture = open_image(encode(stored, form, exif=exif, **options))
    assert picture.size == stored.size
    assert oriented_size(picture, UPRIGHT) == upright.size
    assert oriented_size(picture) == stored.size
    difference = np.subtract(to_rgb(picture, UPRIGHT), upright, dtype=np.int16)
    assert abs(difference).max() <= (60 if form == "JPEG" else 0)
    assert to_rgb(open_image(encode(stored, form, exif=exif, **options))).size == stored.size


@pytest.mark.parametrize("rules", [ImageRules(), UPRIGHT], ids=["stored", "upright"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_tiff_is_turned_once_by_pillow_itself_under_either_rule(orientation: int, rules: ImageRules) -> None:
    upright = noise(48, 32)
    turn = STORED_AS.get(orientation)
    stored = upright if turn is None else upright.transpose(turn)
    data = encode(stored, "TIFF", tiffinfo={274: orientation})
    picture = open_image(data)
    assert oriented_size(picture, rules) == upright.size
    np.testing.assert_array_equal(to_rgb(picture, rules), upright)
    np.testing.assert_array_equal(to_rgb(picture, rules), upright)  # a second call does not turn it again


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"", b"\0" * 40])
def test_unreadable_exif_says_nothing_about_orientation(exif: bytes) -> None:
    image = noise(30, 20)
    np.testing.assert_array_equal(to_rgb(open_image(encode(image, "PNG", exif=exif)), UPRIGHT), image)


@pytest.mark.parametrize("orientation", [0, 9, 65_535])
def test_an_orientation_that_does_not_exist_turns_nothing(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise(30, 20)
    np.testing.assert_array_equal(to_rgb(open_image(encode(image, "PNG", exif=exif)), UPRIGHT), image)


TRANSPARENT = [
    ("RGBA", Image.new("RGBA", (64, 64), (255, 0, 0, 0)), (255, 0, 0)),
    ("LA", Image.new("LA", (64, 64), (90, 0)), (90, 90, 90)),
    ("PA", Image.new("RGBA", (64, 64), (255, 0, 0, 0)).convert("PA"), None),
]


@pytest.mark.parametrize(("mode", "image", "dropped"), TRANSPARENT, ids=[case[0] for case in TRANSPARENT])
def test_alpha_is_dropped_or_laid_on_white(mode: str, image: Image.Image, dropped: tuple[int, ...] | None) -> None:
    assert image.mode == mode
    assert first_pixel(image) == (dropped or image.convert("RGB").getpixel((0, 0)))
    assert first_pixel(image, WHITE) == (255, 255, 255)


def test_a_palettes_transparent_entry_is_dropped_or_laid_on_white() -> None:
    image = Image.new("P", (64, 64), 0)
    image.putpalette([10, 20, 30, 200, 200, 200])
    for transparency in (0, b"\0\xff"):
        data = encode(image, "PNG", transparency=transparency)
        assert first_pixel(data) == (10, 20, 30)
        assert first_pixel(data, WHITE) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "colour", "key"), [("RGB", (9, 8, 7), (9, 8, 7)), ("L", 77, 77), ("1", 1, 1)])
def test_a_transparent_colour_of_the_header_is_dropped_or_laid_on_white(mode: str, colour: object, key: object) -> None:
    image = Image.new(mode, (8, 8), colour)
    data = encode(image, "PNG", transparency=key)
    assert first_pixel(data) == image.convert("RGB").getpixel((0, 0))
    assert first_pixel(data, WHITE) == (255, 255, 255)


def test_half_transparent_red_on_white_is_pink_and_opaque_pictures_stay() -> None:
    assert first_pixel(Image.new("RGBA", (2, 2), (255, 0, 0, 128)), WHITE) == (255, 127, 127)
    np.testing.assert_array_equal(to_rgb(noise(9, 9), WHITE), noise(9, 9))


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_premultiplied_pictures_are_divided_by_their_alpha(mode: str) -> None:
    straight = Image.new({"La": "LA", "RGBa": "RGBA"}[mode], (2, 2), (200, 128) if mode == "La" else (200, 0, 0, 128))
    red, _, _ = first_pixel(straight.convert(mode))
    assert abs(red - 200) <= 1
    assert first_pixel(straight.convert(mode), WHITE)[0] == pytest.approx(227, abs=1)


def wide(value: int, kind: str = "<u2") -> Image.Image:
    return Image.fromarray(np.full((8, 8), value, kind))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("kind", ["<u2", ">u2"])
def test_sixteen_bit_grey_is_clipped_as_in_the_reference_or_scaled(kind: str, form: str) -> None:
    image = wide(32_768, kind)
    for source in (image, encode(image, form)) if kind == "<u2" or form == "TIFF" else (image,):
        assert first_pixel(source) == (255, 255, 255)
        assert first_pixel(source, SCALE) == (128, 128, 128)
        assert first_pixel(source, CHAT_RULES) == (128, 128, 128)


def test_big_endian_samples_are_not_swapped() -> None:
    assert first_pixel(wide(128, ">u2")) == (128, 128, 128)
    assert first_pixel(wide(256, ">u2"), SCALE) == (1, 1, 1)


def test_a_sixteen_bit_ramp_has_256_levels_scaled_and_two_clipped() -> None:
    ramp = Image.fromarray(np.tile((np.arange(256) * 257).astype(np.uint16), (4, 1)))
    levels = [np.unique(np.asarray(to_rgb(ramp, rules))).size for rules in (SCALE, ImageRules())]
    assert levels == [256, 2]
    assert np.asarray(to_rgb(ramp, SCALE))[0, :, 0].tolist() == list(range(256))


def test_thirty_two_bit_grey_is_read_as_sixteen_bit_samples() -> None:
    for value, clipped, scaled in ((-5, 0, 0), (200, 200, 1), (32_768, 255, 128), (1_000_000, 255, 255)):
        image = Image.new("I", (4, 4), value)
        assert first_pixel(image) == (clipped,) * 3
        assert first_pixel(image, SCALE) == (scaled,) * 3
        assert first_pixel(encode(image, "TIFF"), SCALE) == (scaled,) * 3


def test_a_transparent_sixteen_bit_value_is_told_apart_before_scaling() -> None:
    rows = b"".join(b"\0" + struct.pack(">2H", 300, 301) for _ in range(2))
    data = png(2, 2, 16, 0, rows, png_chunk(b"tRNS", struct.pack(">H", 301)))
    both = ImageRules(alpha="white", samples="scale")
    assert [to_rgb(open_image(data), both).getpixel((x, 0)) for x in (0, 1)] == [(1, 1, 1), (255, 255, 255)]


def test_sixteen_bit_colour_keeps_the_high_byte() -> None:
    colour = png(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0x8000, 0x4000, 0xFFFF))
    assert first_pixel(colour) == (128, 64, 255)
    for mode in ("RGB", "RGBA"):
        image = noise(5, 4).convert(mode)
        pages = encode(image, "TIFF", compression="tiff_lzw")
        assert first_pixel(pages) == image.convert("RGB").getpixel((0, 0))
    assert first_pixel(_tiff_16_bit_rgb()) == (128, 64, 255)


def _tiff_16_bit_rgb() -> bytes:
    """A 1 x 1 TIFF with three 16-bit samples, written by hand."""
    entries = [
        (256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, 134), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 140),
        (277, 3, 1, 3), (278, 3, 1, 1), (279, 4, 1, 6), (284, 3, 1, 1),
    ]  # fmt: skip
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    body = b"II*\0" + struct.pack("<I", 8) + directory + b"\0" * 4
    return body + struct.pack("<3H", 16, 16, 16) + struct.pack("<3H", 0x8000, 0x4000, 0xFFFF)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused_at_their_pixel(value: float) -> None:
    samples = np.zeros((5, 6), np.float32)
    samples[3, 2] = value
    with pytest.raises(PromptError, match=r"not a finite number at \(2, 3\)"):
        to_rgb(Image.fromarray(samples))


def test_float_samples_are_clipped_to_eight_bits() -> None:
    for value, expected in ((-3.0, 0), (127.9, 127), (300.0, 255)):
        assert first_pixel(Image.new("F", (2, 2), value)) == (expected,) * 3
        assert first_pixel(encode(Image.new("F", (2, 2), value), "TIFF")) == (expected,) * 3


def test_cmyk_jpeg_and_tiff_are_converted() -> None:
    image = noise(16, 16).convert("CMYK")
    assert to_rgb(open_image(encode(image, "JPEG"))).mode == "RGB"
    np.testing.assert_array_equal(to_rgb(open_image(encode(image, "TIFF"))), image.convert("RGB"))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_file_cut_in_half_is_refused(form: str) -> None:
    data = encode(noise(64, 64), form)
    with pytest.raises(PromptError, match="image 7"):
        to_rgb(open_image(data[: len(data) // 2], name="image 7"), name="image 7")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_cut_file_is_refused_or_was_complete(form: str) -> None:
    image = noise(12, 12)
    data = encode(image, form)
    whole = np.asarray(to_rgb(open_image(data)))
    for stop in range(len(data)):
        try:
            got = to_rgb(open_image(data[:stop]))
        except PromptError:
            continue
        np.testing.assert_array_equal(got, whole)


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """A 20,000 x 20,000 grey PNG of one value is under 400 KB and unpacks to 400 MB."""
    header_only = png(20_000, 20_000, 8, 0, b"\0" * 4096)
    tracemalloc.start()
    with pytest.raises(PromptError, match="400000000 pixels"):
        open_image(header_only)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


def test_published_limits_hold_at_their_edge() -> None:
    server = ImageLimits()
    rows = (b"\0" + b"\x80" * 8192) * 10
    assert open_image(png(8192, 10, 8, 0, rows), limits=server).size == (8192, 10)
    for size in ((8193, 10), (10, 8193)):
        with pytest.raises(PromptError, match=f"{size[0]}x{size[1]}, a side may have 8192"):
            open_image(png(*size, 8, 0, rows), limits=server)
        assert open_image(png(*size, 8, 0, rows)).size == size
    with pytest.raises(PromptError, match="900 pixels, the limit is 899"):
        open_image(noise(30, 30), limits=ImageLimits(pixels=899))
    data = encode(noise(10, 10), "BMP")
    assert open_image(data, limits=ImageLimits(file_bytes=len(data))).size == (10, 10)
    with pytest.raises(PromptError, match=f"{len(data)} bytes, the limit is {len(data) - 1}"):
        open_image(data, limits=ImageLimits(file_bytes=len(data) - 1))


def test_files_are_measured_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PromptError, match="1099511627776 bytes"):
        open_image(path)


@pytest.mark.parametrize("address", ["https://example.org/a.png", "HTTP://example.org/a.png"])
def test_an_address_given_as_a_file_is_told_to_be_one(address: str) -> None:
    with pytest.raises(PromptError, match="it is an address, and images are not fetched; save it"):
        open_image(Path(address))


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"^image 2: .*/nowhere\.png cannot be read: No such file or directory$"):
        open_image(tmp_path / "nowhere.png", name="image 2")
    with pytest.raises(PromptError, match=r"^nowhere\.png cannot be read: No such file or directory$"):
        open_image(tmp_path / "nowhere.png", name="nowhere.png")
    with pytest.raises(PromptError, match="is not a file"):
        open_image(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PromptError, match="is not a file"):
        open_image(tmp_path / "pipe")
    with pytest.raises(PromptError, match="is empty"):
        open_image(b"")
    with pytest.raises(PromptError, match="cannot be read"):
        open_image("a\0b.png")


@pytest.mark.parametrize("source", [7, None, ["a"], {"url": "x"}, 3.5])
def test_what_is_no_picture_is_refused_by_its_type(source: object) -> None:
    with pytest.raises(PromptError, match=f"is a {type(source).__name__}; an image is bytes, a path"):
        open_image(source)


@pytest.mark.parametrize("url", ["http://a.b/c.png", "HTTPS://a.b/c.png"])
def test_remote_pictures_are_not_fetched(url: str) -> None:
    with pytest.raises(PromptError, match="not fetched"):
        open_image(url)


def test_a_picture_without_pixels_is_refused() -> None:
    with pytest.raises(PromptError, match="no pixels"):
        open_image(Image.new("RGB", (0, 5)))


def test_a_decoders_own_failure_is_a_prompt_error() -> None:
    image = Image.open(io.BytesIO(encode(noise(40, 40), "PNG")))
    image.fp.close()  # type: ignore[union-attr]
    with pytest.raises(PromptError, match="cannot be decoded"):
        to_rgb(image)
