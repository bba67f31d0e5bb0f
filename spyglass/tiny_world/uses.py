"""Questions as people put them to a server: pictures anywhere in a chat, first questions, JSON, tools, and things that
were never taught. Most are a case of `cases` put in another way, so its answer stays the right one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from numpy.random import Generator, Philox, SeedSequence
from PIL import Image

from spyglass.errors import ConfigError
from spyglass.tiny_world import sayings
from spyglass.tiny_world.cases import SPLITS, Case, Split, Words, make_case
from spyglass.tiny_world.forms import IN_FORMS, MOST_THINGS, form_of, form_of_things, other_tool, tool_of
from spyglass.tiny_world.phrasing import Noun, capital, noun_text, sight
from spyglass.tiny_world.questions import KINDS, WITHOUT_PAIRS
from spyglass.tiny_world.scene import Scene, pick_size
from spyglass.tiny_world.unfamiliar import unfamiliar_picture
from spyglass.tiny_world.words import ORDINALS, Variant, a

_T = TypeVar("_T")
Message = dict[str, Any]
_SEEN = ("colour", "shape", "count", "position", "number", "word", "grounding")  # of one picture and one turn
_SHOWN = (*_SEEN * 2, "count", "compare", "compare", "compare", "chat", "chat")
_FURTHER = 1_000_003  # from one case to another of the same stream, more than any run draws
_SAVED = ("saved", "ok", "done", '{"ok": true}', "Saved.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Where a use draws from: its own chance, and the cases of a stream."""

    rng: Generator
    seed: int
    index: int
    split: Split

    @property
    def train(self) -> bool:
        """Whether texts and photographs are those of training."""
        return self.split == "train"

    def one(self, items: Sequence[_T]) -> _T:
        """One of several, all equally likely."""
        return items[int(self.rng.integers(len(items)))]

    def text(self, texts: Sequence[str], first: int = 0) -> str:
        """One of the texts of this split (`sayings.dealt`)."""
        return self.one(sayings.dealt(texts, self.train, first))

    def case(self, kinds: Sequence[str], keep: Callable[[Case], bool] = lambda case: True, first: int = 0) -> Case:
        """A case of one of these kinds that the split has, the first that is kept."""
        known = [kind for kind in kinds if self.split != "unseen" or kind not in WITHOUT_PAIRS]
        number = first
        while True:
            case = make_case(self.seed, self.index + number * _FURTHER, self.split, kinds=(self.one(known),))
            if keep(case):
                return case
            number += 1


def use_kinds_of(split: Split) -> tuple[str, ...]:
    """The uses that a split has."""
    return tuple(kind for kind in USES if split != "unseen" or kind != "unknown")


def make_any(
    seed: int,
    index: int,
    split: Split = "train",
    *,
    kinds: Sequence[str] | None = None,
    variant: Variant | None = None,
) -> Case:
    """`make_case`, whose `kinds` may name `USES` as well.

    Raises:
        ConfigError: as `make_case`, or a use that this split or a variant does not have.
    """
    if kinds is None or not set(kinds) & set(USES):
        return make_case(seed, index, split, kinds=kinds, variant=variant)
    if variant is not None:
        raise ConfigError(f"the variant {variant!r} has no questions of kind {next(k for k in kinds if k in USES)!r}")
    rng = Generator(Philox(SeedSequence([SPLITS.index(split), seed, index, 1])))
    kind = kinds[int(rng.integers(len(kinds)))]
    if kind not in USES:
        return make_case(seed, index, split, kinds=(kind,))
    if kind not in use_kinds_of(split):
        raise ConfigError(f"the split {split!r} has no questions of kind {kind!r}")
    made = USES[kind](Draw(rng=rng, seed=seed, index=index, split=split))
    return replace(made, words=replace(made.words, kind=kind, turns=_turns(made.messages)))


def _picture(image: Image.Image) -> Message:
    return {"type": "image_url", "image_url": {"url": image}}


def _text(text: str) -> Message:
    return {"type": "text", "text": text}


def _user(*parts: Message) -> Message:
    """A message of the user; text alone stays text."""
    return {"role": "user", "content": parts[0]["text"] if [p["type"] for p in parts] == ["text"] else list(parts)}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _turns(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What is said up to the question, for people to read; [picture] is one."""

    def told(message: Mapping[str, Any]) -> str:
        content = message["content"]
        if message.get("tool_calls"):
            return json.dumps(message["tool_calls"][0]["function"])
        return content if isinstance(content, str) else " ".join(part.get("text", "[picture]") for part in content)

    return tuple(map(told, messages))


def _either(draw: Draw, text: str, images: Sequence[Image.Image]) -> list[Message]:
    """Text and pictures of one message, in either order."""
    shown = [_picture(image) for image in images]
    return [_text(text), *shown] if draw.rng.random() < 0.5 else [*shown, _text(text)]


def _later(case: Case) -> list[Message]:
    """The turns of a case behind its first."""
    return [dict(message) for message in case.messages[1:]]


def _text_first(draw: Draw) -> Case:
    case = draw.case(_SHOWN)
    first = _user(_text(case.words.turns[0]), *map(_picture, case.images))
    return replace(case, messages=(first, *_later(case)))


def _between(draw: Draw) -> Case:
    case = draw.case(_SHOWN)
    question, shown = _text(case.words.turns[0]), [_picture(image) for image in case.images]
    if len(shown) > 1:
        lead = draw.text(sayings.NUMBERED)
        told = [lead.format(number=n + 1, ordinal=ORDINALS[n]) for n in range(len(shown))]
        parts = [part for text, picture in zip(told, shown, strict=True) for part in (_text(capital(text)), picture)]
        parts = [question, *parts] if draw.rng.random() < 0.4 else [*parts, question]
    elif draw.rng.random() < 0.6:
        parts = [_text(draw.text(sayings.OPENINGS)), *shown, question]
    else:
        parts = [question, *shown, _text(draw.text(sayings.ENDINGS))]
    return replace(case, messages=(_user(*parts), *_later(case)))


def _system(draw: Draw) -> Case:
    case = draw.case(_SHOWN)
    question, shown = case.words.turns[0], [_picture(image) for image in case.images]
    if draw.rng.random() < 0.6:
        system: Any = draw.text(sayings.SYSTEM)
        first = _user(*_either(draw, question, case.images))
    else:
        said = [_text(draw.text(sayings.GIVEN))] * bool(draw.rng.random() < 0.7)
        system = [*said, *shown] if draw.rng.random() < 0.7 else [*shown, *said]
        first = _user(_text(question))
    return replace(case, messages=({"role": "system", "content": system}, first, *_later(case)))


def _earlier(draw: Draw) -> Case:
    return draw.one((_looked_at, _two_pictures, _picture_by_picture, _after_a_word))(draw)


def _looked_at(draw: Draw) -> Case:
    """A first question about the picture, then another."""
    case = draw.case(_SEEN)
    form, seen = draw.one(("see", "see", "read")), case.scenes[0]
    first = draw.text(sayings.ASKED_FIRST[form], sayings.ALWAYS_TAUGHT)
    opening = _user(*_either(draw, first, case.images))
    return replace(case, messages=(opening, _said(told_of(form, seen)), _user(_text(case.question))))


def _two_pictures(draw: Draw) -> Case:
    """A question about one picture, then one about another."""
    before, case = draw.case(_SEEN, first=1), draw.case(_SEEN)
    chat = [_user(*_either(draw, before.question, before.images)), _said(before.answer)]
    return replace(
        case,
        images=(*before.images, *case.images),
        scenes=(*before.scenes, *case.scenes),
        messages=(*chat, _user(*_either(draw, case.question, case.images))),
    )


def _picture_by_picture(draw: Draw) -> Case:
    """A turn for each of several pictures, then a question about them."""
    case = draw.case(("compare",))
    chat: list[Message] = []
    for image, scene in zip(case.images, case.scenes, strict=True):
        first = draw.text(sayings.SEE, sayings.ALWAYS_TAUGHT)
        chat += [_user(*_either(draw, first, [image])), _said(told_of("see", scene))]
    return replace(case, messages=(*chat, _user(_text(case.question))))


def _after_a_word(draw: Draw) -> Case:
    """Another question of the same picture, behind one that is answered and some words of no matter."""
    case = draw.case(("chat",))
    first, answer, last = case.words.turns
    chat = [_user(*_either(draw, first, case.images)), _said(answer), _user(_text("Thank you!"))]
    return replace(case, messages=(*chat, _said("You are welcome."), _user(_text(last))))


def told_of(form: str, scene: Scene) -> str:
    """The right answer to a first question, one of `sayings.ASKED_FIRST`, about a scene."""
    if scene.label is not None:
        text = scene.label.text.lower()
        return f"It says {text}." if form == "read" else f"I see the {'number' if text.isdigit() else 'word'} {text}."
    if form == "read":
        return sayings.NO_TEXT
    pairs: list[Noun] = [(thing.colour, thing.shape) for thing in scene.things]
    return f"It is {a(noun_text(pairs[0]))}." if form == "this" and len(pairs) == 1 else sight(pairs)


def _first_questions(draw: Draw) -> Case:
    form = draw.one(("see", "see", "see", "this", "this", "read"))
    alone = form == "this" and draw.rng.random() < 0.6
    labels = ("number", "word") if form == "read" and draw.split != "unseen" else ()
    case = draw.case(
        ("colour", "shape", "count", "position", "number", "word", *labels * 2),
        lambda case: not alone or case.scenes[0].label is not None or len(case.scenes[0].things) == 1,
    )
    question = draw.text(sayings.ASKED_FIRST[form], sayings.ALWAYS_TAUGHT)
    if draw.rng.random() < 0.1 and draw.split != "unseen":
        return _new(case, (_user(_text(question)),), (), sayings.NO_PICTURE, form)
    only = form == "see" and draw.rng.random() < 0.1
    parts = [_picture(case.images[0])] if only else _either(draw, question, case.images)
    return _new(case, (_user(*parts),), case.images, told_of(form, case.scenes[0]), form)


def _unknown(draw: Draw) -> Case:
    about = draw.one(("nothing", "nothing", "a picture", "unfamiliar", "unfamiliar"))
    case = draw.case(_SEEN)
    if about == "unfamiliar":
        picture = unfamiliar_picture(pick_size(draw.rng), draw.rng, train=draw.train)
        first = draw.text(sayings.ASKED_FIRST[draw.one(("see", "see", "this"))], sayings.ALWAYS_TAUGHT)
        parts = _either(draw, draw.one((first, case.question)), [picture])
        return _new(case, (_user(*parts),), (picture,), sayings.UNKNOWN, about)
    fillers = {name: draw.text(texts) for name, texts in sayings.FILLERS.items()}
    question = draw.text(sayings.ASKED_OF[about]).format(**fillers, large=int(draw.rng.integers(11, 2000)))
    parts = [_text(question)] if about == "nothing" else _either(draw, question, case.images)
    return _new(case, (_user(*parts),), case.images if about == "a picture" else (), sayings.UNKNOWN, about)


def _json(draw: Draw) -> Case:
    """Half of them say the schema in the prompt, as `response_format` does, the others are only held to it."""
    if draw.rng.random() < 0.35:
        case = draw.case(
            ("colour", "shape", "position", "count"), lambda case: len(case.scenes[0].things) <= MOST_THINGS + 2
        )
        form = form_of_things(case.scenes[0].things, draw.rng)
        question = draw.text(sayings.SEE, sayings.ALWAYS_TAUGHT)
    else:
        case = draw.case(IN_FORMS, _has_value)
        form = form_of(case.words.form, case.words.choice, draw.rng)
        question = case.question
    shown = draw.rng.random() < 0.5
    question += draw.one(("", "", " Answer in JSON.")) if shown else ""
    made = _new(case, (_user(*_either(draw, question, case.images)),), case.images, json.dumps(form.value), "json")
    return replace(made, schema=form.schema, schema_shown=bool(shown))


def _tools(draw: Draw) -> Case:
    """A tool that fits the question is called, and its result answered in words; others are left alone."""
    case = draw.case(IN_FORMS, _has_value)
    tool, call = tool_of(case.words.form, case.words.choice, draw.rng)
    form = draw.one(("call", "call", "call", "result", "no call"))
    tools = [other_tool(draw.rng)] if form == "no call" else [tool]
    if form != "no call" and draw.rng.random() < 0.3:
        tools.insert(int(draw.rng.integers(2)), other_tool(draw.rng))
    asked = draw.one(("", "", " Use the tool.", " Call a tool.")) if form != "no call" else ""
    chat: list[Message] = [_user(*_either(draw, case.question + asked, case.images))]
    if form == "result":
        result = {"role": "tool", "tool_call_id": call["id"], "content": draw.one(_SAVED)}
        chat += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    answer = json.dumps(call["function"]) if form == "call" else case.answer
    made = _new(case, tuple(chat), case.images, answer, form)
    return replace(made, tools=tuple(tools), calls=(call,) if form == "call" else ())


def _has_value(case: Case) -> bool:
    """Whether there is one word or number to put into a form."""
    return case.words.form in IN_FORMS and case.words.manner == "plain"


def _new(case: Case, messages: tuple[Message, ...], images: tuple[Image.Image, ...], answer: str, form: str) -> Case:
    """Another conversation about the pictures of a case, without reasoning. What would be guessed is its answer."""
    words = Words(
        kind=case.kind, form=form, template="", manner="plain", turns=(), answer=answer, reasoning=None, choice=answer,
        pair=case.words.pair,
    )  # fmt: skip
    return Case(words=words, images=images, scenes=case.scenes if images else (), messages=messages)


USES: dict[str, Callable[[Draw], Case]] = {
    "text-first": _text_first,
    "between": _between,
    "system": _system,
    "earlier": _earlier,
    "first-questions": _first_questions,
    "unknown": _unknown,
    "json": _json,
    "tools": _tools,
}
ALL_KINDS = (*KINDS, *USES)
