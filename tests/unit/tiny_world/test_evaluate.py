"""Evaluation: a perfect answerer gets everything, one that cannot see gets little, and the table adds up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spyglass.cli.main import main
from spyglass.engine.request import RequestOutput, SamplingParams, Usage
from spyglass.errors import ConfigError
from spyglass.prompt.answers import is_right, overlap, parse_answer
from spyglass.tiny_world.cases import EFFORT, Case, make_case
from spyglass.tiny_world.evaluate import evaluate
from spyglass.tiny_world.questions import KINDS


class Told:
    """Answers a conversation by its text and the size of its first image, which no two cases of a test share."""

    def __init__(self, answers: Mapping[Any, str] | Callable[[Any], str]) -> None:
        self.answers = answers
        self.calls: list[tuple[int, bool, str | None]] = []

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams,
        *,
        thinking: bool,
        effort: str | None,
    ) -> list[RequestOutput]:
        assert params.temperature == 0
        self.calls.append((len(messages), thinking, effort))
        told = [
            self.answers[key(chat)] if isinstance(self.answers, Mapping) else self.answers(chat) for chat in messages
        ]
        texts = [text if "</think>" in text or not thinking else f"I see.</think>{text}" for text in told]
        usage = Usage(prompt_tokens=1, image_tokens=0, completion_tokens=1)
        return [
            RequestOutput(request_id=n, text=text, token_ids=(1,), finish_reason="stop", usage=usage)
            for n, text in enumerate(texts)
        ]


def images_of(chat: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    content = chat[0]["content"]
    return [] if isinstance(content, str) else [part["image_url"]["url"] for part in content if "image_url" in part]


def key(chat: Sequence[Mapping[str, Any]]) -> tuple[str, bytes]:
    texts = [m["content"] if isinstance(m["content"], str) else m["content"][-1]["text"] for m in chat]
    return "|".join(texts), b"".join(image.tobytes()[:3000] for image in images_of(chat))


def asked(num: int, split: Any = "test", kinds: Sequence[str] = tuple(KINDS)) -> list[Case]:
    return [make_case(5, n, split, kinds=(kinds[n % len(kinds)],)) for n in range(num)]


def test_who_answers_perfectly_gets_everything() -> None:
    cases = asked(60)
    told = Told({key(case.messages): case.answer for case in cases})
    report = evaluate(told, 60, 5, batch=16)
    assert report.accuracy == 1.0
    assert [verdict.question for verdict in report.verdicts] == [" / ".join(case.words.turns) for case in cases]
    assert Counter(verdict.kind for verdict in report.verdicts) == dict.fromkeys(KINDS, 6)
    assert {(thinking, effort) for _, thinking, effort in told.calls} == {(False, None), (True, EFFORT)}
    assert sum(count for count, thinking, _ in told.calls if thinking) == sum(c.reasoning is not None for c in cases)
    assert max(count for count, _, _ in told.calls) <= 16


def test_the_table_adds_up_and_ends_with_the_overall_figure() -> None:
    cases = asked(40)
    wrong = {key(case.messages) for case in cases if case.kind == "count"}
    told = Told({key(c.messages): "Many." if key(c.messages) in wrong else c.answer for c in cases})
    lines = evaluate(told, 40, 5).table().splitlines()
    rows = {line.split("  ")[0].strip(): line.split()[-4:] for line in lines[1:]}
    assert rows["count"] == ["0", "4", "0.0", "%"] and rows["colour"] == ["4", "4", "100.0", "%"]
    assert lines[-1].startswith("overall") and rows["overall"] == ["36", "40", "90.0", "%"]
    assert list(rows) == [*KINDS, "overall"]


def test_an_answer_is_compared_whole() -> None:
    case = make_case(0, 1, kinds=("colour",))
    assert is_right(case.answer, case.answer) and is_right(case.answer, f"  {case.answer}\n")
    assert is_right(case.answer, f"I see one thing.</think>{case.answer}")
    for text in ("", case.answer + " Yes.", "Yes. " + case.answer, case.answer.lower(), case.answer.rstrip(".")):
        assert not is_right(case.answer, text)
    other = next(c for c in (make_case(0, n, kinds=("colour",)) for n in range(99)) if c.answer != case.answer)
    assert not is_right(case.answer, other.answer)


def test_a_box_is_right_when_it_overlaps_by_half() -> None:
    case = make_case(0, 3, kinds=("grounding",))
    (box,) = parse_answer(case.answer).boxes
    right = str(list(box))
    x1, y1, x2, y2 = box
    half = [x1, y1, (x1 + x2 + 1) // 2, y2]
    less = [x1, y1, (x1 + x2) // 2 - 1, y2]
    assert is_right(case.answer, case.answer.replace(right, str(half)))
    assert not is_right(case.answer, case.answer.replace(right, str(less)))
    assert not is_right(case.answer, case.answer.replace(right, str([x2, y1, x1, y2])))
    assert not is_right(case.answer, case.answer.replace("<｜box｜>", "").replace("<｜/box｜>", ""))
    assert not is_right(case.answer, case.answer + case.answer[case.answer.index("<｜box｜>") :])


def test_overlap_is_intersection_over_union() -> None:
    assert overlap((0, 0, 10, 10), (0, 0, 10, 10)) == 1
    assert overlap((0, 0, 10, 10), (5, 5, 15, 15)) == pytest.approx(25 / 175)
    assert overlap((0, 0, 10, 10), (10, 0, 20, 10)) == 0 == overlap((0, 0, 10, 10), (12, 12, 20, 20))
    assert overlap((0, 0, 0, 10), (0, 0, 0, 10)) == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num": 0}, "at least one"),
        ({"split": "dev"}, "train, test, unseen"),
        ({"control": "blank"}, "shuffled, grey"),
        ({"variant": "german"}, "roman, negative, french"),
        ({"kinds": ("smell",)}, "smell"),
        ({"kinds": ()}, "empty"),
        ({"split": "unseen", "kinds": ("number",)}, "number"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        evaluate(Told({}), **{"num": 3, **changes})


@pytest.mark.slow
def test_eval_runs_on_a_random_model(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = tmp_path / "sheet.png"
    options = ["--num", "3", "--seed", "2", "--batch", "3", "--device", "cpu", "--sheet", str(sheet)]
    assert main(["eval", str(tiny_folder), *options]) == 0
    assert re.fullmatch(r"overall +0 +3 +0\.0 %", capsys.readouterr().out.splitlines()[-1])
    assert main(["eval", str(tiny_folder), "--num", "3", "--seed", "5", "--device", "cpu"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "reasoning: right to the last word in 0 of 1 answers that had any" and last.startswith("overall")
    assert main(["eval", str(tiny_folder), "--sheet", str(tmp_path)]) == 2
    assert "is a folder; name the file" in capsys.readouterr().err
    with Image.open(sheet) as image:
        assert image.format == "PNG"
    assert main(["eval", str(tiny_folder), *options[:2], "--device", "cpu", "--variant", "roman"]) == 0
    assert "without --lora this is tiny itself" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--num", "0"], "--num"),
        (["--batch", "0"], "--batch"),
        (["--seed", "-1"], "--seed"),
        (["--sheet", "nowhere/sheet.png"], "nowhere"),
        (["--threads", "0"], "threads"),
    ],
)
def test_eval_refuses_before_it_loads(options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "nowhere-at-all", *options]) == 2
    assert told in capsys.readouterr().err
