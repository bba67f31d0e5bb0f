"""Small picture files that the tests share, and files made by hand that no encoder would write."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image


def encode(image: Image.Image, form: str, **options: object) -> bytes:
    """`image` as a file of the format `form`."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def noise(width: int, height: int) -> Image.Image:
    """An RGB picture in which every pixel differs from its neighbours."""
    generator = np.random.default_rng(width * 8192 + height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """One PNG chunk with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG written by hand: `rows` are its filtered scan lines, `extra` chunks stand before the data."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = png_chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + b"".join(extra) + data + png_chunk(b"IEND", b"")
