"""Reasoning is shown apart from the answer, whatever pieces the text comes in."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from spyglass import LLM, SamplingParams
from spyglass.cli.main import main
from spyglass.cli.reasoning import Unfolded, answer_of
from spyglass.cli.talk import Talk
from spyglass.config.shipped import find_model
from spyglass.engine.request import Delta, RequestOutput, Usage

PIECES = st.lists(st.text(" \nab<>/think", max_size=6) | st.sampled_from(["</think>", "</th", "ink>", "<think>"]))


def shown(pieces: list[str], *, reasoning: bool = True, terminal: bool = False) -> str:
    unfolded = Unfolded(reasoning=reasoning, terminal=terminal)
    text = "".join([unfolded.push(piece) for piece in pieces]) + unfolded.finish()
    assert text.count("\x1b[2m") == text.count("\x1b[0m") <= int(terminal), "dim, and not for longer than reasoning"
    return text.replace("\x1b[2m", "").replace("\x1b[0m", "")


def test_a_program_reads_reasoning_between_two_lines_and_a_person_under_a_heading() -> None:
    text = "\nOne circle. \n It is red.\n\n</think>\n\nRed.\n"
    assert shown([text]) == "<think>\nOne circle. \n It is red.\n</think>\nRed.\n"
    assert shown([text], terminal=True) == "Reasoning:\nOne circle. \n It is red.\n\nAnswer:\nRed.\n"


def test_without_thinking_a_text_is_what_it_is() -> None:
    for text in ("plain", " \n a</think>b ", "<think>"):
        assert shown(list(text), reasoning=False) == text


def test_reasoning_that_is_empty_leaves_no_lines_and_one_that_is_cut_has_no_end() -> None:
    assert shown([" \n</think>yes"]) == shown(["</think>", "yes"]) == "yes"
    assert shown(["so </thi"]) == "<think>\nso </thi" and shown(["so \n"]) == "<think>\nso" and shown([" "]) == ""
    assert answer_of("so </thi") == "" and answer_of("so</think>\n\nyes </think>") == "yes </think>"


@given(pieces=PIECES, terminal=st.booleans())
def test_how_a_text_is_cut_into_pieces_does_not_matter_and_nothing_but_space_is_lost(
    pieces: list[str], terminal: bool
) -> None:
    text = "".join(pieces)
    whole = shown([text], terminal=terminal)
    assert shown(pieces, terminal=terminal) == shown(list(text), terminal=terminal) == whole
    reasoned, end, answer = text.partition("</think>")
    heads = ["Reasoning:", "Answer:"] if terminal else ["<think>", "</think>"]
    expected = [heads[0], reasoned, heads[1] if end else "", answer] if reasoned.strip() else [reasoned, answer]
    assert "".join(whole.split()) == "".join("".join(expected).split())


@given(pieces=PIECES)
def test_what_is_shown_is_not_held_longer_than_it_must_be(pieces: list[str]) -> None:
    """Everything but white space and what may begin the end of the reasoning is out as soon as it came."""
    unfolded, out, text = Unfolded(reasoning=True, terminal=False), "", ""
    for piece in pieces:
        out, text = out + unfolded.push(piece), text + piece
        if "</think>" not in text:
            held = "".join(text.split()).removeprefix("".join(out.split()).removeprefix("<think>"))
            assert "</think>".startswith(held)
    assert unfolded.unanswered == ("</think>" not in text)


class Answers:
    """A model that says two things, the first of them cut inside its reasoning, and notes what it was asked."""

    def __init__(self) -> None:
        self.adapters, self.texts, self.asked = (), [["so </", "th"], ["well", "</think>", "yes"]], list[Any]()

    def stream(self, messages: list[dict[str, Any]], params: SamplingParams, **options: Any) -> Iterator[Delta]:
        self.asked.append([(message["role"], message["content"]) for message in messages])
        pieces = self.texts.pop(0)
        usage = Usage(prompt_tokens=1, completion_tokens=len(pieces), image_tokens=0, cached_tokens=0)
        for number, piece in enumerate(pieces):
            output = None
            if number == len(pieces) - 1:
                output = RequestOutput(
                    request_id=0, text="".join(pieces), token_ids=(), finish_reason="length", usage=usage
                )
            yield Delta(request_id=0, text=piece, token_ids=(), output=output)


@pytest.mark.parametrize("stream", [True, False])
def test_all_of_a_cut_reasoning_is_shown_and_none_goes_into_the_next_prompt(
    stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Answers()
    talk = Talk(cast("LLM", model), SamplingParams(), thinking=True, effort=None, stream=stream)
    for question in ("one", "two"):
        talk.ask(question, ())
    assert capsys.readouterr().out == "<think>\nso </th\n<think>\nwell\n</think>\nyes\n"
    assert model.asked[1][1] == ("assistant", "")
    model.texts.append(["end"])
    talk.ask("three", ())
    assert model.asked[2][3] == ("assistant", "yes")


class Terminal(io.StringIO):
    """What a person sees."""

    def isatty(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_the_command_sets_the_reasoning_of_a_model_apart(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = tmp_path / "circle.png"
    picture = Image.new("RGB", (200, 200), "white")
    ImageDraw.Draw(picture).ellipse((50, 50, 150, 150), fill="red")
    picture.save(photo)
    command = ["run", "--model", str(find_model("spyglass-tiny-v4")), "--thinking", "on", "--temperature", "0", *how]
    command += ["--device", "cpu", "--image", str(photo)]
    assert main([*command, "What colour is the circle?"]) == 0
    first, *reasoning, last, answer = capsys.readouterr().out.splitlines()
    assert (first, last) == ("<think>", "</think>") and reasoning and answer
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", terminal)
        assert main([*command, "What colour is the circle?"]) == 0
    head, *seen = terminal.getvalue().splitlines()
    assert head == "\x1b[2mReasoning:" and seen == [*reasoning[:-1], reasoning[-1] + "\x1b[0m", "", "Answer:", answer]
    capsys.readouterr()
    assert main([*command, "--max-tokens", "2", "What colour is the circle?"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("<think>\n") and "</think>" not in out and "still reasoning when it ended (length)" in err
