"""A PNG file before its pixels are read: every checksum compared, metadata that a decoder would stumble over left out.

Pillow compares no checksum of the pixels, and refuses a sound image for a megabyte of text or colour profile beside it.
"""

from __future__ import annotations

import zlib

from spyglass.errors import PromptError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")  # of these only notes of orientation are read, and those are short
_MAX_TEXT, _MAX_TEXTS = 1 << 20, 1 << 24  # bytes of one and of all, unpacked
_MAX_PARTS = 100_000  # encoders write some thousand into the largest files
_LENGTH, _FRAME = 4, 12  # bytes of a part's length; of its length, name and checksum


def sound_png(data: bytes, name: str) -> bytes:
    """The file, without texts and colour profiles that are very large; the same object where it has none.

    Raises:
        PromptError: a part has another checksum than the file says, or the file ends before its last part.
    """
    start, texts, view = len(SIGNATURE), 0, memoryview(data)
    kept, since = [], 0  # what lies between parts that are left out; where the next piece of it begins
    for _ in range(_MAX_PARTS):
        kind = data[start + _LENGTH : start + 2 * _LENGTH]
        end = start + _FRAME + int.from_bytes(data[start : start + _LENGTH], "big")
        if len(kind) < _LENGTH or end > len(data):
            raise PromptError(f"{name} is a PNG that ends too early, after {len(data)} bytes; send the whole file")
        if zlib.crc32(view[start + _LENGTH : end - _LENGTH]) != int.from_bytes(view[end - _LENGTH : end], "big"):
            part = f"{kind.decode('latin-1')!r} at byte {start}"
            raise PromptError(f"{name} is a damaged PNG: its part {part} has a wrong checksum; send the file again")
        size = _unpacked_size(kind, view[start + 2 * _LENGTH : end - _LENGTH]) if kind in _TEXTS else 0
        texts += size
        if size > _MAX_TEXT or (size and texts > _MAX_TEXTS):
            kept.append(view[since:start])
            since = end
        if kind == b"IEND":
            return b"".join([*kept, view[since:]]) if kept else data
        start = end
    raise PromptError(f"{name} is a PNG of more than {_MAX_PARTS} parts; save it anew")


def _unpacked_size(kind: bytes, content: memoryview) -> int:
    """Bytes of a text or profile, counted to just beyond the limit; what cannot be unpacked counts as too large."""
    _, _, rest = bytes(content[: _MAX_TEXT + 1]).partition(b"\0")
    if len(content) > _MAX_TEXT or kind == b"tEXt" or (kind == b"iTXt" and rest[:1] != b"\1"):
        return len(content)
    packed = rest[2:].split(b"\0", 2)[-1] if kind == b"iTXt" else rest[1:]
    try:
        return len(zlib.decompressobj().decompress(packed, _MAX_TEXT + 1))
    except zlib.error:
        return _MAX_TEXT + 1
