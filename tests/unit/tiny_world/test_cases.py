"""The cases of the tiny world: reproducible, held apart, evenly spread, and true of what is drawn."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from spyglass.tiny_world.cases import SPLITS, Case, Split, make_case
from spyglass.tiny_world.words import COLOURS, SHAPES, UNSEEN

WORDS = re.compile(r"[a-z]+")


def fingerprint(case: Case) -> str:
    told = repr((case.words, case.scenes)).encode()
    return hashlib.sha256(told + b"".join(picture.tobytes() for picture in case.pictures)).hexdigest()


def some(split: Split, count: int, seed: int = 0) -> Iterator[Case]:
    return (make_case(seed, index, split) for index in range(count))


def test_any_case_can_be_made_alone_and_in_any_process() -> None:
    code = (
        "from spyglass.tiny_world.cases import make_case\n"
        "from tests.unit.tiny_world.test_cases import fingerprint\n"
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
    for case in some(split, 1200):
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
