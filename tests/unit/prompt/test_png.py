"""PNG files that lie: wrong checksums are refused, and metadata of any size keeps no sound image from being read."""

from __future__ import annotations

import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from spyglass.errors import PromptError
from spyglass.prompt import ImageRules, open_image, to_rgb
from tests.unit.prompt.pictures import encode, noise, png, png_chunk


def test_d1_a_flipped_bit_in_any_part_of_a_png_is_refused() -> None:
    rows = b"".join(b"\0" + bytes(range(row, row + 48)) for row in range(16))
    data = png(16, 16, 8, 2, rows, png_chunk(b"tEXt", b"Title\0owl"))
    open_image(data)
    for place in range(8, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(PromptError, match=r"image 2 is a (damaged )?PNG"):
            open_image(bytes(damaged), name="image 2")


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "WEBP", "JPEG", "AVIF"])
@pytest.mark.parametrize("cut", [1, 4, 12, 400])
def test_d1_a_file_that_ends_too_early_is_refused_in_every_format(form: str, cut: int) -> None:
    data = encode(noise(64, 48), form)
    with warnings.catch_warnings(), pytest.raises(PromptError):
        warnings.simplefilter("ignore")
        to_rgb(open_image(data[:-cut]))


BIG = b"a" * 1_100_000
TEXTS = {
    "zTXt": png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(BIG)),
    "iTXt": png_chunk(b"iTXt", b"Comment\0\1\0en\0Comment\0" + zlib.compress(BIG)),
    "plain iTXt": png_chunk(b"iTXt", b"Comment\0\0\0en\0Comment\0" + BIG),
    "tEXt": png_chunk(b"tEXt", b"Comment\0" + BIG),
    "profile": png_chunk(b"iCCP", b"icc\0\0" + zlib.compress(BIG * 2)),
    "damaged text": png_chunk(b"zTXt", b"Comment\0\0" + b"no deflate"),
    "many": png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(BIG[:1_000_000])) * 80,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_d2_metadata_of_any_size_keeps_no_png_from_being_read(text: bytes) -> None:
    image = noise(224, 224)
    data = encode(image, "PNG")
    behind, before = data.index(b"IDAT") - 4, len(data) - 12
    for place in (behind, before):
        found = to_rgb(open_image(data[:place] + text + data[place:]))
        np.testing.assert_array_equal(found, image)


def test_d2_an_orientation_beside_large_metadata_still_counts() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(noise(30, 20), "PNG", exif=exif)
    place = data.index(b"IDAT") - 4
    assert to_rgb(open_image(data[:place] + TEXTS["zTXt"] + data[place:]), ImageRules(exif="upright")).size == (20, 30)


def test_a_png_of_millions_of_parts_is_refused_before_they_are_walked() -> None:
    data = png(1, 1, 8, 0, b"\0\0", png_chunk(b"abCd", b"") * 100_001)
    with pytest.raises(PromptError, match="more than 100000 parts"):
        open_image(data)
