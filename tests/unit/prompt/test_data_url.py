"""Data URLs as clients write them: many spellings, one picture; what is broken is refused by name."""

from __future__ import annotations

import base64
import textwrap
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.errors import PromptError
from spyglass.prompt import ImageLimits, open_image, to_rgb
from spyglass.prompt.data_url import decode_data_url
from tests.unit.prompt.pictures import encode, noise

PICTURE = noise(8, 8)
DATA = encode(PICTURE, "PNG")
PLAIN = base64.b64encode(DATA).decode()
SPELLINGS = {
    "plain": f"data:image/png;base64,{PLAIN}",
    "one parameter": f"data:image/jpeg;charset=utf-8;base64,{PLAIN}",
    "two parameters": f"data:image/png;charset=utf-8;name=a.png;base64,{PLAIN}",
    "no media type": f"data:;base64,{PLAIN}",
    "capitals": f"DATA:IMAGE/PNG;BASE64,{PLAIN}",
    "spaces": f"data:image/png; base64, {PLAIN} ",
    "other media type": f"data:text/plain;base64,{PLAIN}",
    "no padding": f"data:image/png;base64,{PLAIN.rstrip('=')}",
    "line breaks": "data:image/png;base64," + "\r\n".join(textwrap.wrap(PLAIN, 76)),
    "url-safe": "data:image/png;base64," + base64.urlsafe_b64encode(DATA).decode(),
    "url-safe, no padding": "data:image/png;base64," + base64.urlsafe_b64encode(DATA).decode().rstrip("="),
    "percent-encoded base64": "data:image/png;base64," + quote(PLAIN, safe=""),
    "percent-encoded bytes": "data:image/png," + quote(DATA),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_picture(spelling: str) -> None:
    np.testing.assert_array_equal(to_rgb(open_image(SPELLINGS[spelling])), PICTURE)


def test_the_test_picture_needs_padding_and_both_alphabets() -> None:
    assert PLAIN.endswith("=")
    assert {"+", "/"} <= set(PLAIN)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "field is a data URL without a comma"),
        ("data:image/png;base64,", "field is empty"),
        ("data:image/png;base64,A", "field is not base64: 1 characters"),
        ("data:image/png;base64,AAAA=AAA", "field is not base64"),
        ("data:image/png;base64,AA!A", "field is not base64"),
        ("data:image/png;base64,AAAA!!!!", "field is not base64"),
        ("data:image/png;base64,http://a.b/c.png", "field is not base64"),
        ("data:image/png;base64,AAA\u00e9", "field has a character at 3"),
        ("data:image/png,AAAA", "field is none of JPEG, PNG"),
        ("data:image/png;base64,SGVsbG8sIHdvcmxkIQ", "field is none of JPEG, PNG"),
    ],
)
def test_what_is_broken_is_refused_with_its_field(url: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        open_image(url, name="field")


def test_the_size_limit_holds_before_and_after_decoding() -> None:
    few = ImageLimits(file_bytes=len(DATA) - 1)
    for spelling in ("plain", "percent-encoded bytes", "percent-encoded base64"):
        with pytest.raises(PromptError, match=f"holds {len(DATA)} bytes, one image may have {len(DATA) - 1}"):
            open_image(SPELLINGS[spelling], limits=few)
        assert open_image(SPELLINGS[spelling], limits=ImageLimits(file_bytes=len(DATA))).size == (8, 8)
    with pytest.raises(PromptError, match="more than the 10 bytes"):
        open_image(SPELLINGS["plain"], limits=ImageLimits(file_bytes=10))


def test_another_scheme_is_no_data_url() -> None:
    with pytest.raises(PromptError, match="is not a data URL"):
        decode_data_url("file:///etc/passwd", most_bytes=10, name="field")


@given(data=st.binary(max_size=60), safe=st.booleans(), padded=st.booleans(), width=st.integers(1, 80))
def test_bytes_survive_every_spelling_of_base64(data: bytes, safe: bool, padded: bool, width: int) -> None:
    text = (base64.urlsafe_b64encode if safe else base64.b64encode)(data).decode()
    text = text if padded else text.rstrip("=")
    body = "\n".join(text[i : i + width] for i in range(0, len(text), width))
    assert decode_data_url(f"data:;base64,{body}", most_bytes=60, name="field") == data


@given(text=st.text(max_size=40))
def test_any_text_behind_the_scheme_is_bytes_or_a_prompt_error(text: str) -> None:
    try:
        assert isinstance(decode_data_url("data:" + text, most_bytes=100, name="field"), bytes)
    except PromptError as error:
        assert "field" in str(error)
