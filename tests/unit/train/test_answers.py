"""Answers of held-out chats are counted as if they were drawn token by token, in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from spyglass.config import read_model_config
from spyglass.config.shipped import find_model
from spyglass.prompt.answers import is_right, may_become_right
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.train.answers import FEWEST_PASSES, ExactMatch, compared, shown_chats
from spyglass.train.data import Chat, Learner
from spyglass.train.packing import Sample

LONG = " ".join(["I look at pictures and answer questions about them."] * 9)


@pytest.fixture(scope="module")
def learner() -> Learner:
    folder = find_model("spyglass-tiny-v4")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return Learner(read_model_config(folder), tokenizer)


def chat(answer: str, question: str = "Who are you?", tools: Sequence[Any] = (), **last: Any) -> Chat:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **last}]
    return Chat(
        line=1, messages=messages, tools=tools, tokens=1, targets=1, images=0, digest=b"", task="all",
        ignored=frozenset(),
    )  # fmt: skip


class Parrot:
    """In place of a model: says `said` to whom it knows by the prompt, token by token, and counts its passes."""

    def __init__(self, learner: Learner, pairs: Sequence[tuple[Chat, str]]) -> None:
        end = learner.tokenizer.special_id("<｜end▁of▁sentence｜>")
        assert end is not None
        self.size, self.passes, self.chats = learner.config.text.vocab_size, 0, list[int]()
        self.known = [
            (one.prompt.ids_T.tolist(), [*learner.tokenizer.encode_text(said), end])
            for (asked, said) in pairs
            for one in shown_chats([asked], learner, 1)
        ]

    def __call__(self, samples: Sequence[Sample]) -> torch.Tensor:
        self.passes += 1
        self.chats.append(len(samples))
        best = [self._next(sample.prompt.ids_T[: row + 1].tolist()) for sample in samples for row in _rows(sample)]
        return torch.nn.functional.one_hot(torch.tensor(best), self.size).float()

    def _next(self, ids: list[int]) -> int:
        """What follows: the next token of what is said, or after other words any."""
        prompt, said = next((p, s) for p, s in self.known if ids[: len(p)] == p)
        drawn = ids[len(prompt) :]
        return said[len(drawn)] if drawn == said[: len(drawn)] and len(drawn) < len(said) else 0


def _rows(sample: Sample) -> list[int]:
    """Rows whose next token is asked for."""
    return [row - 1 for row in sample.learn_T.nonzero()[0].tolist()]


def count(
    learner: Learner, pairs: Sequence[tuple[str, str]], most_chats: int = 8, tell: Callable[[str], None] = print
) -> tuple[tuple[int, int], Parrot]:
    """Right and asked of pairs of a right answer and what is said."""
    asked = [chat(right, question=f"Question {number}?") for number, (right, _) in enumerate(pairs)]
    parrot = Parrot(learner, [(one, said) for one, (_, said) in zip(asked, pairs, strict=True)])
    shown = shown_chats(asked, learner, len(asked))
    match = ExactMatch(shown, parrot, learner, most_tokens=100_000, most_chats=most_chats, tell=tell)
    return match().get("all", (0, 0)), parrot


def test_one_more_blank_in_a_long_answer_is_right_in_a_few_passes(learner: Learner) -> None:
    """The draft is laid on again after something was put in, left out or said otherwise."""
    assert len(learner.tokenizer.encode_text(LONG)) > 64
    assert count(learner, [(LONG, LONG)])[1].passes == 1
    for said in (LONG.replace(" ", "  ", 1), LONG.replace("pictures and", "pictures   and", 2), "\n " + LONG):
        assert said != LONG and is_right(LONG, said)
        found, parrot = count(learner, [(LONG, said)])
        assert found == (1, 1) and parrot.passes <= 8


def test_an_answer_with_many_blanks_is_right_however_many_passes_it_takes(learner: Learner) -> None:
    encode = learner.tokenizer.encode_text
    blanks = [LONG.replace(" ", "\n", number) for number in range(30)]
    said = next(text for text in reversed(blanks) if len(encode(text)) < len(encode(LONG)) + 16)
    found, parrot = count(learner, [(LONG, said)])
    assert found == (1, 1) and said.count("\n") > 5 and parrot.passes <= FEWEST_PASSES


def test_a_wrong_answer_ends_as_soon_as_it_cannot_become_right(learner: Learner) -> None:
    wrong = [(LONG, "No. " + LONG), (LONG, "A boat."), (LONG, LONG + " Not."), (LONG, LONG[:-8])]
    found, parrot = count(learner, wrong)
    assert found == (0, 4) and parrot.passes <= 4
    box = "<｜box｜>[[100, 100, 200, 200]]<｜/box｜>"
    pairs = [(f"Here {box}.", f"Here {box.replace('100, 100', other)}.") for other in ("110, 95", "190, 190")]
    assert count(learner, pairs)[0] == (1, 2)


def test_the_passes_of_a_measurement_are_bounded_and_open_answers_are_told_and_not_counted(learner: Learner) -> None:
    """Chats take turns, so short answers are counted beside one that takes long."""
    told: list[str] = []
    letters = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3
    spelt = "".join(f"{letter}\n\t" for letter in letters.split())  # no token of it is one of the right answer
    pairs = [("Yes.", "Yes."), (letters.strip(), spelt), ("No.", "Yes.")]
    found, parrot = count(learner, pairs, most_chats=1, tell=told.append)
    assert found == (1, 2) and parrot.passes == FEWEST_PASSES
    assert told == [f"held out: answers open after {FEWEST_PASSES} passes, which do not count: 1"]
    found, parrot = count(learner, [("Yes.", "Yes.")] * 20)
    assert found == (20, 20) and parrot.chats == [8, 8, 4]


def test_only_what_eval_would_compare_without_reasoning_is_asked(learner: Learner) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chats = [
        chat("Yes."),
        chat("Yes.", reasoning_content="Hm."),
        chat("Yes.", tools=[tool]),
        chat("", tool_calls=[call]),
    ]
    able, left_out = compared(chats)
    assert able == chats[:1] and left_out == {"with reasoning": 1, "without a question, or with tools": 2}


def test_an_answer_may_become_right_until_a_word_or_a_box_is_another() -> None:
    box = "<｜box｜>[[100, 100, 200, 200]]<｜/box｜>"
    right = f"The café is {box}, and  {box} too."
    assert all(may_become_right(right, right[:length]) for length in range(len(right) + 1))
    assert may_become_right(right, "The caf\ufffd") and may_become_right(right, " \n The   ca")
    assert may_become_right(right, f"The café is {box.replace('200', '190')}, and <｜box｜>[[9")
    for wrong in ("A", "The café i s", f"{right} No", f"The café is {box.replace('100', '190')}", f"The café {box}"):
        assert not may_become_right(right, wrong), wrong
