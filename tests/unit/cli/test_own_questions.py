"""`spyglass eval --data`: people's own questions are asked, compared letter by letter, and counted by task."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spyglass.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
SHOWN = {"type": "image_url", "image_url": {"url": "shapes.jpg"}}


def line(question: str, answer: Any, **more: Any) -> str:
    """An entry about the image that comes along: a red triangle and two other things."""
    asked = [SHOWN, {"type": "text", "text": question}]
    return json.dumps(
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **more}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "examples" / "shapes.jpg", tmp_path / "shapes.jpg")
    return tmp_path


@pytest.mark.slow
def test_right_answers_are_counted_by_task_and_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = folder / "own.jsonl"
    lines = [
        line("What shape is the red thing?", "It is a triangle.", task="shape"),
        line("What shape is the red thing?", "It is a  triangle.\n", task="shape"),
        line("What shape is the red thing?", "It is a triangle", task="shape"),
        line("How many things are there?", "There are three.", task="count"),
        json.dumps({"conversations": [{"from": "human", "value": "<image>What shape is the red thing?"},
                                      {"from": "gpt", "value": "a triangle"}], "images": ["shapes.jpg"]}),
    ]  # fmt: skip
    data.write_text("\n".join(lines), encoding="utf-8")
    options = ["--device", "cpu", "--threads", "1", "--sheet", str(folder / "sheet.png")]
    assert main(["eval", "--data", str(data), *options]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["shape", "2", "3"],
        ["count", "1", "1"],
        ["all", "0", "1"],
        ["overall", "3", "5"],
    ]
    with Image.open(folder / "sheet.png") as sheet:
        assert sheet.width == 1800, "six tiles"
    assert main(["eval", "--data", str(data), "--lora", "roman", "--num", "4", "--device", "cpu"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert rows[1][:3] == ["count", "0", "1"], "with the adapter it counts in Roman numerals"


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "the last message must be the assistant's"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "behind a question"),
        ('{"messages": []}', "the last message must be the assistant's"),
        (line("a", ""), "only answers of text can be compared"),
        (line("a", "b", tools=[{"type": "function"}]), "only answers of text can be compared"),
        ("[1", "begins like a JSON array"),
        ("x", "line 1: not JSON"),
        ("", "has no question"),
    ],
)
def test_what_cannot_be_asked_is_told_with_its_line_before_a_model_is_loaded(
    entry: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spyglass.engine.LLM", None)
    (folder / "own.jsonl").write_text(entry, encoding="utf-8")
    assert main(["eval", "--data", str(folder / "own.jsonl")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--seed", "1"], ["--split", "unseen"], ["--control", "grey"], ["--variant", "roman"]]
)
def test_options_about_questions_of_its_own_do_not_go_with_a_file(
    option: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--data", str(folder / "own.jsonl"), *option]) == 2
    assert f"{option[0]} is about the questions that eval makes itself" in capsys.readouterr().err
