"""Ask a model fresh questions about the tiny world and count the right answers, kind by kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from PIL import Image, ImageOps

from spyglass.config.model import ModelConfig
from spyglass.engine.request import RequestOutput, SamplingParams, Structured
from spyglass.errors import ConfigError
from spyglass.progress import Progress
from spyglass.prompt.answers import is_right, is_thought, read_calls, read_json
from spyglass.prompt.build import build_prompt
from spyglass.prompt.chat import Effort
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.prompt.tokens import Prompt
from spyglass.tiny_world.cases import EFFORT, Case, Split, kinds_of, make_case, with_images
from spyglass.tiny_world.questions import IMAGE_LEFT_OUT
from spyglass.tiny_world.uses import USES, make_any
from spyglass.tiny_world.words import Variant

Control = Literal["shuffled", "grey"]
CONTROLS: tuple[Control, ...] = ("shuffled", "grey")
_GREY = (128, 128, 128)
_THUMBNAIL = (168, 126)
_MOST_TOKENS = 128  # of an answer with reasoning; right ones are much shorter
_MOST_IN_FORM = 320  # of JSON or a call


class Answerer(Protocol):
    """What is asked: an `LLM`, or a part of one that answers lists of conversations."""

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams,
        *,
        thinking: bool,
        effort: Effort | None,
    ) -> list[RequestOutput]:
        """Answers to conversations, in order."""


class FormAnswerer(Answerer, Protocol):
    """What is asked for JSON and with tools, too: as a server asks it, by prompts that say them."""

    @property
    def config(self) -> ModelConfig:
        """The model's."""

    @property
    def tokenizer(self) -> PromptTokenizer | None:
        """The model's."""

    def generate(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Answers to prompts, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One question and how it was answered. `question` is the conversation up to it, `thumbnails` its images.

    `thought`: whether the whole reasoning was right, None = it was asked for none.
    """

    kind: str
    pair: tuple[str, str] | None
    question: str
    expected: str
    said: str
    right: bool
    thumbnails: tuple[Image.Image, ...]
    thought: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All verdicts of an evaluation, in the order of the questions."""

    verdicts: tuple[Verdict, ...]
    by_pair: bool = False

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return sum(verdict.right for verdict in self.verdicts) / len(self.verdicts)

    def thoughts(self) -> str | None:
        """How many whole thoughts were right, in words; None = no question asked for one."""
        thoughts = [verdict.thought for verdict in self.verdicts if verdict.thought is not None]
        told = f"reasoning: right to the last word in {sum(thoughts)} of {len(thoughts)} answers that had any"
        return told if thoughts else None

    def table(self) -> str:
        """Right answers by kind and, of unseen combinations, by pair; the last line is the overall figure."""
        rows = _grouped(self.verdicts, lambda verdict: verdict.kind)
        if self.by_pair:
            rows |= _grouped(self.verdicts, lambda verdict: " ".join(verdict.pair or ()))
        rows["overall"] = list(self.verdicts)
        width = max(map(len, rows))
        lines = [f"{'':<{width}}  right  asked  accuracy"]
        for name, verdicts in rows.items():
            right = sum(verdict.right for verdict in verdicts)
            lines.append(f"{name:<{width}}  {right:>5}  {len(verdicts):>5}  {100 * right / len(verdicts):>6.1f} %")
        return "\n".join(lines)


def evaluate(
    llm: Answerer,
    num: int,
    seed: int = 0,
    *,
    split: Split = "test",
    control: Control | None = None,
    variant: Variant | None = None,
    kinds: Sequence[str] | None = None,
    batch: int = 32,
    progress: bool = False,
) -> Report:
    """Ask `num` questions, the kinds in turn, greedily, `batch` at a time.

    Controls show whether the images are looked at: "shuffled" asks about the images of another question of the same
    kind, "grey" about uniform ones of the same sizes. Kinds without images are left out of both. `progress` shows a
    bar on a terminal.

    Raises:
        ConfigError: a split, control, variant or kind that does not exist, or no questions asked for.
    """
    if num < 1:
        raise ConfigError(f"{num} questions are none; ask at least one")
    if control is not None and control not in CONTROLS:
        raise ConfigError(f"there is no control {control!r}; the controls are {', '.join(CONTROLS)}")
    asked = kinds_of(split, variant) if kinds is None else tuple(kinds)
    if control is not None:
        asked = tuple(kind for kind in asked if kind not in (*IMAGE_LEFT_OUT, *USES))
    if not asked:
        raise ConfigError("the list of kinds is empty, or holds none with pictures; leave it out for all of them")
    verdicts: list[Verdict] = []
    with Progress(total=num, unit=" questions", desc="asking", show=progress) as bar:
        for first in range(0, num, batch):
            numbers = range(first, min(first + batch, num))
            cases = [
                _case(seed, number, num, asked[number % len(asked)], split, control, variant) for number in numbers
            ]
            said = _ask_cases(llm, cases)
            verdicts += [_verdict(case, text) for case, text in zip(cases, said, strict=True)]
            bar.update(len(cases))
    return Report(verdicts=tuple(verdicts), by_pair=split == "unseen")


def _case(
    seed: int, number: int, num: int, kind: str, split: Split, control: Control | None, variant: Variant | None
) -> Case:
    case = make_any(seed, number, split, kinds=(kind,), variant=variant)
    if control == "grey":
        return with_images(case, [Image.new("RGB", image.size, _GREY) for image in case.images])
    if control == "shuffled":
        other = number + num
        while True:
            donor = make_case(seed, other, split, kinds=(kind,), variant=variant)
            if len(donor.images) == len(case.images):
                return with_images(case, donor.images)
            other += num
    return case


def _ask_cases(llm: Answerer, cases: Sequence[Case]) -> list[str]:
    """Greedy answers to cases, asked together."""
    in_form = [case for case in cases if case.tools or case.schema is not None]
    plain = [case for case in cases if not (case.tools or case.schema is not None)]
    said = ask_all(llm, [case.messages for case in plain], [case.reasoning is not None for case in plain])
    answers = iter(said), iter(ask_in_form(cast("FormAnswerer", llm), in_form) if in_form else ())
    return [next(answers[bool(case.tools or case.schema is not None)]) for case in cases]


def ask_in_form(llm: FormAnswerer, cases: Sequence[Case]) -> list[str]:
    """Greedy answers with the cases' tools and schemas, in the prompt and JSON held to its schema, as a server does."""
    prompts = [
        build_prompt(case.messages, llm.config, llm.tokenizer, tools=case.tools, response_format=case.response_format)
        for case in cases
    ]
    forms = [None if case.schema is None else Structured(kind="json_schema", value=case.schema) for case in cases]
    params = [SamplingParams(temperature=0, max_tokens=_MOST_IN_FORM, structured=form) for form in forms]
    return [output.text for output in llm.generate(prompts, params)]


def _is_right(case: Case, said: str) -> bool:
    """Whether an answer is the right one: JSON by its value, a call by its name and arguments."""
    if case.schema is not None:
        return bool(read_json(said) == json.loads(case.answer))
    if case.calls:
        return read_calls(said) == [
            (call["function"]["name"], read_json(call["function"]["arguments"])) for call in case.calls
        ]
    return is_right(case.answer, said)


def ask_all(llm: Answerer, chats: Sequence[Sequence[Mapping[str, Any]]], thinking: Sequence[bool]) -> list[str]:
    """Greedy answers to conversations, asked together; where `thinking` says so the reasoning comes first."""
    params = SamplingParams(temperature=0, max_tokens=_MOST_TOKENS)
    said: dict[int, str] = {}
    for thinks in (False, True):
        chosen = [number for number, each in enumerate(thinking) if each == thinks]
        if chosen:
            asked = [chats[number] for number in chosen]
            outputs = llm.chat(asked, params, thinking=thinks, effort=EFFORT if thinks else None)
            for number, output in zip(chosen, outputs, strict=True):
                said[number] = output.text if output.reasoning is None else f"{output.reasoning}</think>{output.text}"
    return [said[number] for number in range(len(chats))]


def _verdict(case: Case, said: str) -> Verdict:
    return Verdict(
        kind=case.kind,
        pair=case.words.pair,
        question=" / ".join(case.words.turns),
        expected=case.answer,
        said=said,
        right=_is_right(case, said),
        thumbnails=tuple(ImageOps.contain(image, _THUMBNAIL) for image in case.images),
        thought=None if case.reasoning is None else is_thought(case.reasoning, said),
    )


def _grouped(verdicts: Sequence[Verdict], name: Callable[[Verdict], str]) -> dict[str, list[Verdict]]:
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(name(verdict), []).append(verdict)
    return groups
