"""Data URLs as browsers and client libraries really write them (RFC 2397 with the usual liberties).

Accepted: any or no media type, any parameters, `;base64` in any case, base64 with or without padding, with line
breaks, in the standard or the URL-safe alphabet, percent-encoded or not; without `;base64` the body is
percent-encoded bytes. The media type is not looked at: what an image is, its bytes say.
"""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import unquote_to_bytes

from spyglass.errors import PromptError

_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SPACE = re.compile(rb"[ \t\r\n\f\v]+")


def is_data_url(text: str) -> bool:
    """Whether `text` starts with the scheme `data:`, in any case."""
    return text[:5].lower() == "data:"


def decode_data_url(url: str, *, most_bytes: int, name: str) -> bytes:
    """Bytes of a data URL; `name` says in errors which field it was.

    Raises:
        PromptError: no comma, a body that is not base64, or more than `most_bytes` bytes.
    """
    if not is_data_url(url):
        raise PromptError(f"{name} is not a data URL: it starts with {url[:12]!r}; write data:image/png;base64,...")
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise PromptError(f"{name} is a data URL without a comma; write data:image/png;base64,...")
    is_base64 = "base64" in (parameter.strip().lower() for parameter in header.split(";")[1:])
    if len(body) > 4 * most_bytes:  # every byte takes at least 4/3 and, percent-encoded base64, at most 4 characters
        raise PromptError(f"{name} holds more than the {most_bytes} bytes that one image may have; send a smaller file")
    try:
        data = unquote_to_bytes(body.encode("ascii")) if "%" in body else body.encode("ascii")
    except UnicodeEncodeError as error:
        raise PromptError(f"{name} has a character at {error.start} of its body that no data URL may have") from None
    if is_base64:
        data = _decode_base64(data, name)
    if len(data) > most_bytes:
        raise PromptError(f"{name} holds {len(data)} bytes, one image may have {most_bytes}; send a smaller file")
    return data


def _decode_base64(text: bytes, name: str) -> bytes:
    text = _SPACE.sub(b"", text).translate(_URL_SAFE).rstrip(b"=")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error:
        raise PromptError(
            f"{name} is not base64: {len(text)} characters without padding, from A-Z a-z 0-9 + / (or - _); "
            "was it cut off, or is it not a data URL at all?"
        ) from None
