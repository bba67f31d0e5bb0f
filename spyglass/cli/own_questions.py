"""People's own questions: chats whose last answer is known, in any of the files that `spyglass finetune` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from spyglass.errors import PromptError
from spyglass.prompt.answers import is_right
from spyglass.prompt.decode import open_image, to_rgb
from spyglass.tiny_world.evaluate import Answerer, Report, Verdict
from spyglass.train.entries import chat_of, expected_answer, read_entries

if TYPE_CHECKING:
    from spyglass.prompt.tokenizer import PromptTokenizer

_THUMBNAIL = (168, 126)
_LONGER = 16  # tokens that an answer may have more than the right one: it is wrong by then
_REASONING = 2048  # tokens before an answer with reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnQuestion:
    """A conversation up to its last answer, which is `expected`; `task` groups questions in the table."""

    task: str
    messages: Sequence[Mapping[str, Any]]
    expected: str
    thinking: bool


def read_questions(path: Path) -> list[OwnQuestion]:
    """The questions of a file.

    Raises:
        PromptError: entries that cannot be used (all are listed), none at all, or a file that cannot be read.
    """
    found, faults = [], []
    for entry in read_entries(path):
        try:
            if entry.fault is not None:
                raise PromptError(entry.fault)
            found.append(_question(entry.value, path))
        except PromptError as error:
            faults.append(f"{entry.place}: {error}")
    if faults:
        listed = "\n  ".join(faults)
        raise PromptError(f"{path}: {len(faults)} of {len(faults) + len(found)} entries cannot be asked\n  {listed}")
    if not found:
        raise PromptError(f'{path} has no question; it needs lines of the form {{"messages": [...]}}')
    return found


def evaluate_own(
    llm: Answerer, questions: Sequence[OwnQuestion], tokenizer: PromptTokenizer, *, batch: int, progress: bool
) -> Report:
    """Ask them greedily, `batch` at a time; an answer is right if it is the expected one, white space aside, and its
    boxes overlap those by half.

    Raises:
        PromptError, CapacityError: as `LLM.chat`; the message names the first question of the group.
    """
    from spyglass.engine.request import SamplingParams
    from spyglass.progress import Progress

    said: dict[int, str] = {}
    with Progress(total=len(questions), unit=" questions", desc="asking", show=progress) as bar:
        for thinking in (False, True):
            chosen = [number for number, question in enumerate(questions) if question.thinking == thinking]
            for first in range(0, len(chosen), batch):
                group = chosen[first : first + batch]
                longest = max(len(tokenizer.encode_text(questions[number].expected)) for number in group)
                params = SamplingParams(temperature=0, max_tokens=longest + _LONGER + _REASONING * thinking)
                asked = [questions[number].messages for number in group]
                outputs = llm.chat(asked, params, thinking=thinking, effort=None)
                said |= {number: output.text for number, output in zip(group, outputs, strict=True)}
                bar.update(len(group))
    return Report(verdicts=tuple(_verdict(question, said[number]) for number, question in enumerate(questions)))


def _question(value: Any, path: Path) -> OwnQuestion:
    raw = chat_of(value, path.parent)
    expected = expected_answer(raw.messages, raw.tools)
    *messages, last = raw.messages
    return OwnQuestion(
        task=raw.task, messages=messages, expected=expected, thinking=bool(last.get("reasoning_content"))
    )


def _verdict(question: OwnQuestion, said: str) -> Verdict:
    words = [text for message in question.messages for text in _texts(message)]
    return Verdict(
        kind=question.task,
        pair=None,
        question=" / ".join(words),
        expected=question.expected,
        said=said,
        right=is_right(question.expected, said),
        thumbnails=tuple(_thumbnails(question.messages)),
    )


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else []:
        if part.get("type") == "text":
            yield part["text"]


def _thumbnails(messages: Sequence[Mapping[str, Any]]) -> Iterator[Image.Image]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part.get("type") == "image_url":
                url = part["image_url"]
                source: Any = url.get("url") if isinstance(url, Mapping) else url
                yield ImageOps.contain(to_rgb(open_image(source)), _THUMBNAIL)
