"""One question about the tiny world: `make_case(seed, index)` makes any of them, alone and in any process.

The splits are three disjoint streams of seeds. "train" and "test" never hold a thing of a colour and shape in
`words.UNSEEN`; in "unseen" the thing that is asked about is one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.random import Generator, Philox, SeedSequence
from PIL import Image

from spyglass.errors import ConfigError
from spyglass.tiny_world import phrasing
from spyglass.tiny_world.asking import MAKERS, Draft, World
from spyglass.tiny_world.images import draw, invert
from spyglass.tiny_world.phrasing import Noun
from spyglass.tiny_world.questions import KINDS, MANNERS, QUESTIONS, WITHOUT_PAIRS, Manner
from spyglass.tiny_world.scene import Scene
from spyglass.tiny_world.words import COUNTS, VARIANTS, Variant

Split = Literal["train", "test", "unseen"]
SPLITS: tuple[Split, ...] = ("train", "test", "unseen")
EFFORT: Literal["low"] = "low"  # of cases with reasoning: the renderer adds no preamble to it
THINKING_KINDS = ("colour", "shape", "count", "position")
_THINKING = 0.15  # share of the cases of these kinds
# What is drawn where nobody says otherwise
EVERYDAY = (
    *("colour", "shape", "count", "position", "number", "word", "compare", "grounding") * 3,
    *("count", "position", "number", "number", "word", "word", "chat", "chat", "text"),
)
_VARIANT_KINDS: Mapping[Variant, tuple[str, ...]] = {
    "roman": ("count", "number"),
    "negative": ("colour", "colour", "colour", "shape"),  # where one colour taken for another is a mistake
    "french": EVERYDAY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What is said in a case.

    `turns`: the conversation up to the question, which comes last; the model's turns are every second one. `form`,
    `template`, `manner`: how the question is worded. `reasoning` None = without thinking. `choice` is what someone who
    knows the question but not the image would have to guess. `pair` is the (colour, shape) asked about, if any.
    """

    kind: str
    form: str
    template: str
    manner: Manner
    turns: tuple[str, ...]
    answer: str
    reasoning: str | None
    choice: str
    pair: tuple[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A conversation that ends with a question, and its answer.

    `messages` are in OpenAI form with PIL images, ready for `LLM.chat` (thinking at effort `EFFORT` where
    `words.reasoning` is given); `scenes` say what the images show. `tools` are those of the request and `calls` the one
    right answer, if that is a call; `schema` is what an answer in JSON follows, said in the prompt if `schema_shown`.
    """

    words: Words
    images: tuple[Image.Image, ...]
    scenes: tuple[Scene, ...]
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    calls: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None
    schema_shown: bool = False

    @property
    def kind(self) -> str:
        """One of `KINDS`, or of `uses.USES`."""
        return self.words.kind

    @property
    def question(self) -> str:
        """The text of the last question."""
        return self.words.turns[-1]

    @property
    def answer(self) -> str:
        """The one right answer, without reasoning."""
        return self.words.answer

    @property
    def reasoning(self) -> str | None:
        """What is thought before answering; None = the case is without thinking."""
        return self.words.reasoning

    @property
    def response_format(self) -> dict[str, Any] | None:
        """That of the request, where the prompt says it."""
        if self.schema is None or not self.schema_shown:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema}}

    def dialogue(self) -> list[dict[str, Any]]:
        """The messages with the answer as the last one, its reasoning as `reasoning_content`."""
        if self.calls:
            return [*self.messages, {"role": "assistant", "content": "", "tool_calls": list(self.calls)}]
        thought = {} if self.reasoning is None else {"reasoning_content": self.reasoning}
        return [*self.messages, {"role": "assistant", "content": self.answer, **thought}]


def kinds_of(split: Split, variant: Variant | None = None) -> tuple[str, ...]:
    """Kinds that a split of a variant has, in the order of `KINDS`.

    Raises:
        ConfigError: a split or variant that does not exist.
    """
    _check(split, None, variant)
    known = set(_everyday(split, variant))
    return tuple(kind for kind in KINDS if kind in known)


def make_case(
    seed: int,
    index: int,
    split: Split = "train",
    *,
    kinds: Sequence[str] | None = None,
    variant: Variant | None = None,
) -> Case:
    """Case number `index` of a seed (both from 0), drawn from `kinds` (repeated names come more often).

    Variants are tasks for adapters: "roman" answers with Roman numerals, "negative" shows inverted images and answers
    as for the originals, "french" answers in French.

    Raises:
        ConfigError: a split, kind or variant that does not exist.
    """
    words, scenes, rng = _make(seed, index, split, kinds, variant)
    images = tuple(draw(scene, rng) for scene in scenes)
    if variant == "negative":
        images = tuple(invert(image) for image in images)
    return Case(words=words, images=images, scenes=scenes, messages=_messages(words, images))


def with_images(case: Case, images: Sequence[Image.Image]) -> Case:
    """The same conversation about other images, as many as it had. `scenes` still tell of the old ones."""
    assert len(images) == len(case.images), (len(images), len(case.images))
    return replace(case, images=tuple(images), messages=_messages(case.words, tuple(images)))


def _messages(words: Words, images: tuple[Image.Image, ...]) -> tuple[dict[str, Any], ...]:
    shown = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    first, *rest = words.turns
    opening: dict[str, Any] = {"role": "user", "content": [*shown, {"type": "text", "text": first}] if shown else first}
    roles = ("assistant", "user")
    return opening, *({"role": roles[number % 2], "content": text} for number, text in enumerate(rest))


def case_words(
    seed: int,
    index: int,
    split: Split = "train",
    *,
    kinds: Sequence[str] | None = None,
    variant: Variant | None = None,
) -> Words:
    """What is said in a case, without drawing its images.

    Raises:
        ConfigError: as `make_case`.
    """
    return _make(seed, index, split, kinds, variant)[0]


def _make(
    seed: int, index: int, split: Split, kinds: Sequence[str] | None, variant: Variant | None
) -> tuple[Words, tuple[Scene, ...], Generator]:
    _check(split, kinds, variant)
    rng = Generator(Philox(SeedSequence([SPLITS.index(split), seed, index])))
    pool = tuple(kinds) if kinds is not None else _everyday(split, variant)
    kind = pool[rng.integers(len(pool))]
    draft = MAKERS[kind](World(rng=rng, unseen=split == "unseen", variant=variant))
    return _put_in_words(kind, draft, rng, variant), draft.scenes, rng


def _put_in_words(kind: str, draft: Draft, rng: Generator, variant: Variant | None) -> Words:
    template = _wording(draft.form, rng)
    manner = _manner(draft.form, rng)
    turns = [phrasing.ask(template, draft.meaning) + MANNERS[manner]]
    if draft.before is not None:
        form, meaning = draft.before
        wording = _wording(form, rng)
        turns = [phrasing.ask(wording, meaning), phrasing.answer(form, "plain", wording, meaning, variant), *turns]
    thinks = rng.random() < _THINKING and variant is None and kind in THINKING_KINDS and draft.form != "side"
    return Words(
        kind=kind,
        form=draft.form,
        template=template,
        manner=manner,
        turns=tuple(turns),
        answer=phrasing.answer(draft.answer_form, manner, template, draft.meaning, variant),
        reasoning=_reasoning(kind, draft) if thinks else None,
        choice=template if draft.form == "talk" else draft.choice,
        pair=draft.pair,
    )


def _wording(form: str, rng: Generator) -> str:
    return QUESTIONS[form][rng.integers(len(QUESTIONS[form]))]


def _manner(form: str, rng: Generator) -> Manner:
    if form in ("box", "talk"):
        return "plain"
    manners: tuple[Manner, ...] = ("plain", "plain", "sentence", "brief")
    return manners[rng.integers(len(manners))]


def _reasoning(kind: str, draft: Draft) -> str:
    seen: list[Noun] = [(thing.colour, thing.shape) for thing in draft.scenes[0].things]
    count = f" I count {COUNTS[draft.meaning.count]}." if kind == "count" else ""
    return phrasing.sight(seen) + count


def _everyday(split: Split, variant: Variant | None) -> tuple[str, ...]:
    kinds = EVERYDAY if variant is None else _VARIANT_KINDS[variant]
    return kinds if split != "unseen" else tuple(kind for kind in kinds if kind not in WITHOUT_PAIRS)


def _check(split: str, kinds: Sequence[str] | None, variant: str | None) -> None:
    if split not in SPLITS:
        raise ConfigError(f"there is no split {split!r}; the splits are {', '.join(SPLITS)}")
    if variant is not None and variant not in VARIANTS:
        raise ConfigError(f"there is no variant {variant!r}; the variants are {', '.join(VARIANTS)}")
    known = [kind for kind in KINDS if split != "unseen" or kind not in WITHOUT_PAIRS]
    for kind in kinds if kinds is not None else ():
        if kind not in known:
            raise ConfigError(
                f"the split {split!r} has no questions of kind {kind!r}; its kinds are {', '.join(known)}"
            )
    if kinds is not None and not kinds:
        raise ConfigError("the list of kinds is empty; leave it out for all of them")
