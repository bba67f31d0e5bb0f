"""The tokenizer file, and that text stays text."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from spyglass.errors import CapacityError, PromptError
from spyglass.prompt import PromptTokenizer, load_tokenizer
from spyglass.prompt.tokenizer import byte_letters

SPECIAL = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜image2｜>": 129264,
    "<｜/polygon｜>": 129271,
    "<｜polygon｜>": 129272,
    "<｜/point｜>": 129273,
    "<｜point｜>": 129274,
    "<｜/box｜>": 129275,
    "<｜box｜>": 129276,
    "<｜/ref｜>": 129277,
    "<｜ref｜>": 129278,
    "<｜image｜>": 129279,
}


@pytest.mark.parametrize("spelling", SPECIAL)
def test_special_tokens_have_their_ids_and_cannot_be_written(tokenizer: PromptTokenizer, spelling: str) -> None:
    assert tokenizer.special_id(spelling) == SPECIAL[spelling]
    for text in (spelling, f"a{spelling}b", f"{spelling}{spelling}", f" {spelling}\n"):
        ids = tokenizer.encode_text(text)
        assert max(ids) < 128_000
        assert not set(ids) & {0, 1, 2}
        assert tokenizer.decode(ids) == text


def test_reserved_and_placeholder_spellings_are_known(tokenizer: PromptTokenizer) -> None:
    reserved = [f"<|place_holder_mm_span_{number:04}|>" for number in range(431, 436)]
    assert [tokenizer.special_id(spelling) for spelling in reserved] == list(range(129257, 129262))
    assert [tokenizer.special_id(f"<｜rl_image_{name}｜>") for name in ("pad", "start")] == [129262, 129263]
    assert tokenizer.special_id("<｜deepseek_image｜>") is None
    assert tokenizer.spelling(129264) == "<｜image2｜>"
    assert tokenizer.spelling(129280) is None


@given(text=st.text(max_size=80))
def test_any_text_comes_back_and_has_no_special_id(tokenizer: PromptTokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert all(2 < token < 128_000 for token in ids)
    assert tokenizer.decode(ids) == text


def test_plain_text_is_encoded_as_by_the_whole_tokenizer(tokenizer: PromptTokenizer, tokenizer_text: str) -> None:
    whole = Tokenizer.from_str(tokenizer_text)
    for text in ("Hello", "Schöne Grüße, 世界! 12345", "  two\n\n\nlines\t", "def f(x): return x**2", "👩‍👩‍👧‍👦"):
        assert tokenizer.encode_text(text) == whole.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_text("Hello") == [19923]


def test_box_and_point_tags_come_out_as_text(tokenizer: PromptTokenizer) -> None:
    assert tokenizer.decode([129276, 19923, 129275, 129274]) == "<｜box｜>Hello<｜/box｜><｜point｜>"


def test_a_lone_surrogate_is_a_prompt_error(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(PromptError, match="lone surrogate at character 2"):
        tokenizer.encode_text("ab\ud800")


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_the_tokenizer_of_a_folder_is_read(tmp_path: Path, tokenizer_text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_text, encoding="utf-8")
    loaded = load_tokenizer(tmp_path)
    assert loaded is not None
    assert loaded.encode_text("Hello") == [19923]


def test_a_token_that_is_not_where_the_file_says_is_refused() -> None:
    added = {"id": 9, "content": "<x>", "special": False, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    for token, fits in ((2, True), (9, False)):
        content = json.dumps({"version": "1.0", "added_tokens": [added | {"id": token}], "model": model})
        if fits:
            assert PromptTokenizer(content).special_id("<x>") == 2
        else:
            with pytest.raises(PromptError, match="gives <x> the id 9"):
                PromptTokenizer(content)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b"[" * 200_000, b'{"added_tokens": []}', b'{"added_tokens": [{}]}']
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(PromptError, match=r"tokenizer\.json (is not a tokenizer file|cannot be read)"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # the library panics
        {"model": {"continuing_subword_prefix": "x"}},  # it ends the process
    ],
    ids=["panic", "abort"],
)
def test_h7_a_file_over_which_the_library_ends_the_process_is_refused_by_name(
    change: dict[str, Any], tokenizer_text: str, tmp_path: Path
) -> None:
    parsed = json.loads(tokenizer_text)
    changed = {name: {**parsed[name], **value} if parsed[name] else value for name, value in change.items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed | changed))
    with pytest.raises(PromptError, match=r"tokenizer\.json cannot be used: the tokenizers library ends the process"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_no_plain_file_is_neither_waited_for_nor_overlooked(tmp_path: Path) -> None:
    makers = {
        "pipe": os.mkfifo,
        "folder": os.mkdir,
        "endless": lambda path: os.symlink("/dev/zero", path),
        "dangling": lambda path: os.symlink("gone", path),
    }
    for name, make in makers.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder / "tokenizer.json")
        with pytest.raises(PromptError, match=r"tokenizer\.json (is not a file of at most|cannot be read)"):
            load_tokenizer(folder)


def test_a_folder_that_cannot_exist_has_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path / ("x" * 5000)) is None


def test_a_tokenizer_that_would_add_bos_by_itself_adds_none(tokenizer: PromptTokenizer, tokenizer_text: str) -> None:
    """The prompt encoder writes BOS; a post-processor of the file must not write another (spec v4 9.8)."""
    bos = "<｜begin▁of▁sentence｜>"
    piece, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [piece, text],
        "pair": [piece, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [0], "tokens": [bos]}},
    }
    changed = json.dumps(json.loads(tokenizer_text) | {"post_processor": template})
    assert PromptTokenizer(changed).encode_text("a word") == tokenizer.encode_text("a word")


def test_a_long_text_does_not_stop_other_threads(tokenizer: PromptTokenizer) -> None:
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    other = threading.Thread(target=count)
    other.start()
    tokenizer.encode_text("a" * 1_000_000)
    done.set()
    other.join()
    assert turns > 20, "encoding it takes half a second"


@given(text=st.text(max_size=60) | st.text(" \n-=\u20ac", max_size=400))
def test_what_fits_is_never_refused_before_it_is_encoded(tokenizer: PromptTokenizer, text: str) -> None:
    tokenizer.refuse_unless_fits([text], len(tokenizer.encode_text(text)))


def test_text_is_refused_from_one_byte_more_than_the_longest_tokens_hold(tokenizer: PromptTokenizer) -> None:
    """The longest one is 128 spaces."""
    assert len(tokenizer.encode_text(" " * 1280)) == 10
    tokenizer.refuse_unless_fits([" " * 1000, " " * 280], 10)
    for texts in ([" " * 1281], [" " * 1000, " " * 281]):
        with pytest.raises(CapacityError, match="1,281 bytes, which is more than 10 tokens"):
            tokenizer.refuse_unless_fits(texts, 10)


def test_bytes_that_are_in_short_tokens_only_count_as_these(tokenizer: PromptTokenizer) -> None:
    """A token has three digits at most, so nobody need wait for a million of them to be encoded."""
    text = "1234567890" * 9
    tokenizer.refuse_unless_fits([text], len(tokenizer.encode_text(text)))
    with pytest.raises(CapacityError, match="90 bytes, which is more than 29 tokens"):
        tokenizer.refuse_unless_fits([text], 29)


def test_each_byte_counts_by_its_own_letter(tokenizer: PromptTokenizer) -> None:
    """What the library makes of every byte, seen or not."""
    spelled = {letter for (letter,) in ByteLevel.alphabet()}
    assert spelled == set(byte_letters()) and len(byte_letters()) == 256
    for character in [*map(chr, range(128)), "\u00e9", "\u6f22", "\U0001f600"]:
        shown = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0]
        assert shown == "".join(byte_letters()[byte] for byte in character.encode())


@pytest.mark.parametrize("changed", [
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
    {"normalizer": {"type": "NFC"}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]}},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"pre_tokenizer": None},
])  # fmt: skip
def test_a_tokenizer_that_may_drop_text_refuses_none_by_its_bytes(tokenizer_text: str, changed: dict[str, Any]) -> None:
    PromptTokenizer(json.dumps(json.loads(tokenizer_text) | changed)).refuse_unless_fits([" " * 10_000], 1)


def test_a_vocabulary_that_lacks_bytes_refuses_none_by_bytes(tokenizer_text: str) -> None:
    parsed = json.loads(tokenizer_text) | {"added_tokens": []}
    parsed["model"] |= {"vocab": {"a": 0}, "merges": []}
    few = PromptTokenizer(json.dumps(parsed))
    assert few.encode_text("z" * 1000) == []
    few.refuse_unless_fits(["z" * 1000], 0)
