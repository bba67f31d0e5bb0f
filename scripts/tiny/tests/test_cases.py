"""The cases of the tiny world: reproducible, held apart, evenly spread, and true of what is drawn."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from spyglass.errors import ConfigError
from spyglass.tiny_world import scene as layout
from spyglass.tiny_world.cases import SPLITS, Case, Split, case_words, kinds_of, make_case
from spyglass.tiny_world.corpus import all_texts
from spyglass.tiny_world.questions import ANSWERS, IMAGE_LEFT_OUT, KINDS, QUESTIONS, SAME_ANSWERS
from spyglass.tiny_world.words import COLOURS, COUNTS, ORDINALS, PRINTED_WORDS, SHAPES, UNSEEN, VARIANTS

LETTERS = re.compile(r"[a-z]+")


def fingerprint(case: Case) -> str:
    told = repr((case.words, case.scenes)).encode()
    return hashlib.sha256(told + b"".join(image.tobytes() for image in case.images)).hexdigest()


def some(split: Split, count: int, seed: int = 0) -> Iterator[Case]:
    return (make_case(seed, index, split) for index in range(count))


def test_any_case_can_be_made_alone_and_in_any_process() -> None:
    code = (
        "from spyglass.tiny_world.cases import make_case\n"
        "from scripts.tiny.tests.test_cases import fingerprint\n"
        "print(*(fingerprint(make_case(3, i, 'test')) for i in (7, 2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [fingerprint(make_case(3, index, "test")) for index in (7, 2)]


def test_cases_differ_by_seed_index_and_split() -> None:
    cases = [make_case(seed, index, split) for seed in (0, 1) for index in (0, 1) for split in SPLITS]
    assert len({fingerprint(case) for case in cases}) == len(cases)


def test_making_cases_loads_no_torch() -> None:
    code = "import sys, spyglass.tiny_world.cases; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("split", ["train", "test"])
def test_no_picture_and_no_sentence_of_a_trained_split_holds_an_unseen_pair(split: Split) -> None:
    for case in some(split, 400):
        things = {(thing.colour, thing.shape) for scene in case.scenes for thing in scene.things}
        assert not things & UNSEEN
        told = " ".join([*case.words.turns, case.answer, case.reasoning or ""])
        for colour, shape in UNSEEN:
            assert not re.search(rf"\b{colour} {shape}", told), told


def test_in_the_unseen_split_the_question_is_about_an_unseen_pair() -> None:
    pairs = Counter()
    for case in some("unseen", 300):
        assert case.words.pair in UNSEEN
        assert case.words.pair in {(thing.colour, thing.shape) for scene in case.scenes for thing in scene.things}
        pairs[case.words.pair] += 1
    assert set(pairs) == UNSEEN
    assert {colour for colour, _ in UNSEEN} <= set(COLOURS) and {shape for _, shape in UNSEEN} == set(SHAPES)


def test_every_kind_has_twenty_wordings_and_uses_them_all() -> None:
    for kind, forms in KINDS.items():
        wordings = [template for form in forms for template in QUESTIONS[form]]
        assert len(set(wordings)) == len(wordings) >= 20, kind
        used = {case_words(1, index, kinds=(kind,)).template for index in range(600)}
        assert used == set(wordings), kind
    assert sorted(form for forms in KINDS.values() for form in forms) == sorted(QUESTIONS)


def test_every_way_to_answer_is_used() -> None:
    used = set()
    for kind, forms in KINDS.items():
        for index in range(150):
            words = case_words(1, index, kinds=(kind,))
            assert words.form in forms
            used.add((SAME_ANSWERS.get(words.form, words.form), words.manner))
    told = {(form, manner) for form, manners in ANSWERS.items() for manner in manners if " " not in form}
    assert told <= used


def test_the_wording_of_a_question_decides_the_wording_of_its_answer() -> None:
    """With the facts taken out, one wording and manner has one answer."""
    facts = re.compile("|".join([*COLOURS, *SHAPES, *PRINTED_WORDS, *COUNTS, *ORDINALS, r"\d+"]), re.IGNORECASE)
    for kind in ("colour", "shape", "number", "word"):
        forms: dict[tuple[str, str], set[str]] = defaultdict(set)
        for index in range(600):
            words = case_words(2, index, kinds=(kind,))
            forms[words.template, words.manner].add(re.sub(r"\ban?\b", "a", facts.sub("*", words.answer)))
        assert max(map(len, forms.values())) == 1, kind


def test_the_vocabulary_is_small() -> None:
    heard = Counter(word for index in range(2500) for text in said(index) for word in LETTERS.findall(text))
    assert len(heard) <= 200
    assert set(PRINTED_WORDS) <= set(heard)


def said(index: int) -> list[str]:
    words = case_words(0, index)
    return [text.lower() for text in (*words.turns, words.answer, words.reasoning or "")]


def test_the_corpus_holds_every_printed_word_digit_and_coordinate() -> None:
    corpus = list(all_texts(num_cases=50))
    assert {*PRINTED_WORDS, *"0123456789", "0", "50", "950"} <= set(corpus)
    assert re.search(r"\b(cercle|carré|étoile)\b", " ".join(corpus)) and re.search(r"\b[IVX]{2,}\b", " ".join(corpus))
    assert corpus == list(all_texts(num_cases=50)) != list(all_texts(num_cases=50, seed=1))
    assert all(text == text.strip() and text for text in corpus)


def test_roman_answers_have_roman_numerals_and_the_others_none() -> None:
    numbers = re.compile(r"\b[IVXLC]+\b")
    for index in range(150):
        words = case_words(0, index, variant="roman")
        assert words.kind in ("count", "number") and numbers.search(words.answer)
        assert not re.search(r"\d", words.answer) and not set(COUNTS) & set(LETTERS.findall(words.answer.lower()))
        plain = case_words(0, index, kinds=("count",))
        assert not numbers.search(plain.answer)


@pytest.mark.parametrize("kind", list(KINDS))
def test_french_answers_say_the_same_in_french(kind: str) -> None:
    """English words of things never come up in them; the two agree on what differs from case to case."""
    english = set(COLOURS) - {"orange"} | set(SHAPES) - {"triangle"} | {"the", "is", "it", "one", "picture", "circles"}
    pairs: dict[str, set[str]] = defaultdict(set)
    for index in range(400):
        words = case_words(0, index, kinds=(kind,))
        french = case_words(0, index, kinds=(kind,), variant="french")
        assert french.turns[0] == words.turns[0] and french.reasoning is None
        assert not english & set(re.findall(r"\w+", french.answer.lower())), french.answer
        assert "{" not in french.answer and "  " not in french.answer
        pairs[words.answer].add(french.answer)
    assert len({answer for answers in pairs.values() for answer in answers}) >= 0.7 * len(pairs)


def test_each_variant_has_its_kinds_and_each_split_too() -> None:
    assert kinds_of("test") == tuple(KINDS) == kinds_of("train", "french")
    assert kinds_of("test", "roman") == ("count", "number") and "colour" in kinds_of("test", "negative")
    assert not {"number", "word", "text"} & set(kinds_of("unseen"))
    for variant in VARIANTS:
        with pytest.raises(ConfigError, match="smell"):
            make_case(0, 0, kinds=("smell",), variant=variant)


def test_pictures_come_with_every_question_but_those_of_text() -> None:
    for kind in KINDS:
        for index in range(10):
            case = make_case(0, index, kinds=(kind,))
            assert (not case.images) == (kind in IMAGE_LEFT_OUT)
            assert len(case.images) in ((2, 3) if kind == "compare" else (0, 1))
            assert [message["role"] for message in case.dialogue()][-2:] == ["user", "assistant"]
            assert (case.reasoning is not None) == ("reasoning_content" in case.dialogue()[-1])
            assert len(case.messages) == (3 if kind == "chat" else 1)


def test_things_never_touch_and_stand_on_one_side_only() -> None:
    """Small images, whose boxes are rounded most: equal neighbours that touch would look like one thing, and of two
    things a corner apart, "left of" and "above" would both be right."""
    rng = np.random.default_rng(7)
    for _ in range(15_000):
        size = int(rng.integers(64, 96)), int(rng.integers(64, 96))
        boxes = layout.scatter(rng, size, int(rng.integers(4, 9)))
        assert all(_between(a, b) >= 1 for place, a in enumerate(boxes) for b in boxes[:place]), (size, boxes)
        side = int(rng.integers(4))
        first, second = layout.facing(rng, size, side)
        holds = (first[2] <= second[0], first[0] >= second[2], first[3] <= second[1], first[1] >= second[3])
        assert holds == tuple(number == side for number in range(4)), (size, first, second)


def _between(a: layout.Box, b: layout.Box) -> int:
    """Pixels between two boxes, along the axis where there are most."""
    return max(max(a[n], b[n]) - min(a[n + 2], b[n + 2]) for n in range(2))
