"""Evaluation: controls, thoughts, unseen pairs and the contact sheet."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from PIL import Image

from spyglass.prompt.answers import is_thought
from spyglass.tiny_world.cases import case_words, make_case
from spyglass.tiny_world.evaluate import Report, Verdict, evaluate
from spyglass.tiny_world.questions import IMAGE_LEFT_OUT, KINDS, WITHOUT_PAIRS
from spyglass.tiny_world.sheet import contact_sheet
from spyglass.tiny_world.words import UNSEEN
from tests.unit.tiny_world.test_evaluate import Told, asked, images_of, key


def test_thoughts_are_counted_beside_the_answers_whole_ones_only() -> None:
    """Four are thought as they should be, the fifth lacks its last letter, for the rest "I see." is said."""
    cases = [case for case in asked(120) if case.reasoning is not None]
    told = {key(case.messages): case.answer for case in asked(120)}
    for case, end in zip(cases, (None, None, None, None, -1), strict=False):
        told[key(case.messages)] = f"{(case.reasoning or '')[:end]}</think>{case.answer}"
    report = evaluate(Told(told), 120, 5)
    assert len(cases) > 5 and report.thoughts() == f"thoughts: 4 of {len(cases)} right, every word"
    assert [verdict.thought for verdict in report.verdicts].count(None) == 120 - len(cases)
    assert report.accuracy == 1.0, "answers do not depend on them"
    assert evaluate(Told(lambda _: ""), 6, 5, kinds=("text",)).thoughts() is None
    assert is_thought("I see.", "I see.</think>Red.") and not is_thought("I see.", "I see.")


def test_unseen_combinations_have_rows_of_their_own() -> None:
    kinds = [kind for kind in KINDS if kind not in WITHOUT_PAIRS]
    cases = asked(35, "unseen", kinds)
    report = evaluate(Told({key(case.messages): case.answer for case in cases}), 35, 5, split="unseen")
    named = {line.split("  ")[0] for line in report.table().splitlines()}
    assert {" ".join(case.words.pair or ()) for case in cases} == named & {" ".join(pair) for pair in UNSEEN}


@pytest.mark.parametrize("control", ["grey", "shuffled"])
def test_controls_change_the_pictures_and_nothing_else(control: Any) -> None:
    """The questions stay; a grey image keeps its size, a shuffled one is that of another question of the kind."""
    kinds = tuple(kind for kind in KINDS if kind not in IMAGE_LEFT_OUT)
    cases = asked(27, kinds=kinds)
    seen: list[Any] = []
    report = evaluate(Told(lambda chat: seen.append(chat) or ""), 27, 5, control=control)  # type: ignore[func-returns-value]
    assert [verdict.question for verdict in report.verdicts] == [" / ".join(case.words.turns) for case in cases]
    assert not report.accuracy
    in_order = sorted(cases, key=lambda case: case.reasoning is not None)  # one batch: without thinking first
    for case, chat in zip(in_order, seen, strict=True):
        given = images_of(chat)
        assert key(chat)[0] == key(case.messages)[0]
        assert len(given) == len(case.images)
        if control == "grey":
            assert [p.size for p in given] == [p.size for p in case.images]
            assert all(p.getextrema() == ((128, 128),) * 3 for p in given)
        else:
            assert [p.tobytes() for p in given] != [p.tobytes() for p in case.images]


def test_who_does_not_look_is_right_less_than_three_times_in_ten_on_every_kind() -> None:
    """The guesser knows the most frequent answer to every wording from training."""
    for kind in KINDS:
        if kind in IMAGE_LEFT_OUT:
            continue
        heard: dict[str, Counter[str]] = defaultdict(Counter)
        for index in range(1200):
            words = case_words(0, index, kinds=(kind,))
            heard[words.template][words.choice] += 1
        fresh = [case_words(0, index, "test", kinds=(kind,)) for index in range(600)]
        lucky: dict[str, list[bool]] = defaultdict(list)
        for words in fresh:
            lucky[words.form].append(heard[words.template].most_common(1)[0][0] == words.choice)
        assert sum(map(sum, lucky.values())) / len(fresh) < 0.27, kind
        assert max(sum(hits) / len(hits) for hits in lucky.values()) < 0.36, kind


def test_the_contact_sheet_shows_wrong_and_right_ones() -> None:
    image = Image.new("RGB", (100, 50), "blue")

    def verdict(number: int, right: bool) -> Verdict:
        return Verdict(
            kind="colour",
            pair=None,
            question=f"What is number {number}?",
            expected="It is blue.",
            said="It is blue." if right else "It is red.",
            right=right,
            thumbnails=(image,),
        )

    verdicts = [verdict(n, n % 10 != 0) for n in range(100)]
    sheet = contact_sheet(verdicts, most=12)
    colours = Counter(sheet.get_flattened_data())
    frames = {name: colours[colour] for name, colour in (("right", (30, 140, 60)), ("wrong", (200, 30, 30)))}
    assert frames["right"] > 5000 and frames["wrong"] > 5000 and colours[(0, 0, 255)] > 12 * 2000
    assert contact_sheet(verdicts[1:9], most=12).height < sheet.height * 2
    few_right = [verdict(n, n % 10 == 0) for n in range(20)]
    assert contact_sheet(few_right, most=18).height * 2 == sheet.height * 3, "wrong ones where right ones are too few"
    assert Report(verdicts=tuple(verdicts)).accuracy == 0.9


def test_the_contact_sheet_draws_the_boxes_of_answers() -> None:
    case = make_case(0, 3, kinds=("grounding",))
    plain, boxed = (
        contact_sheet(
            [
                Verdict(
                    kind="grounding",
                    pair=None,
                    question="",
                    expected=text,
                    said="<｜box｜>[[900, 900, 10, 10]]<｜/box｜>" if text else "",
                    right=False,
                    thumbnails=case.images,
                )
            ]
        ).crop((8, 8, 290, 120))
        for text in ("", case.answer)
    )
    drawn = Counter(boxed.get_flattened_data()) - Counter(plain.get_flattened_data())
    assert drawn[(30, 140, 60)] > 20 and drawn[(200, 30, 30)] > 100
