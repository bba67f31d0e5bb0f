"""What each kind of question puts into its images and asks of them: one function per kind, `MAKERS` by name.

Answers are spread evenly, so that nobody does well by guessing: no answer to a wording comes up in more than about a
quarter of its cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from numpy.random import Generator

from spyglass.tiny_world import scene as layout
from spyglass.tiny_world.images import MUTED, largest_letter
from spyglass.tiny_world.phrasing import Meaning, Noun
from spyglass.tiny_world.scene import Box, Label, Lettering, Scene, Thing
from spyglass.tiny_world.words import COLOURS, PRINTED_WORDS, SHAPES, UNSEEN, Variant

Pair = tuple[str, str]  # colour, shape
_T = TypeVar("_T")
_MOST_COUNT = 6
_LABEL_COLOURS = ("red", "green", "blue", "purple", "black", "white")
_MOST_ROMAN = 99
_BACKGROUNDS = (*MUTED * 2, *("plain", "white", "white", "black") * 2, "white")
_TURNS = {"square": 12.0, "triangle": 12.0, "star": 18.0, "cross": 12.0}  # most degrees, still plainly upright
_LEAST_TURNED, _LEAST_OUTLINED = 22, 28  # pixels: smaller things would lose their form
_NEAR = 0.5  # share of the counts of a colour and shape where what else there is has one of the two
_OUTLINED = 0.2  # share of the things that have an outline, where their shape allows one


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A case before it is worded and drawn. `before` is an earlier question of the same chat."""

    form: str
    meaning: Meaning
    choice: str
    scenes: tuple[Scene, ...] = ()
    answered_as: str | None = None
    before: tuple[str, Meaning] | None = None
    pair: Pair | None = None

    @property
    def answer_form(self) -> str:
        """The form of the answer, which is mostly that of the question."""
        return self.answered_as or self.form


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where a maker draws from: chance, and whether the thing asked about is of an unseen pair."""

    rng: Generator
    unseen: bool = False
    variant: Variant | None = None
    allowed: tuple[Pair, ...] = field(
        default=tuple((colour, shape) for colour in COLOURS for shape in SHAPES if (colour, shape) not in UNSEEN)
    )

    def one(self, items: Sequence[_T]) -> _T:
        """One of several, all equally likely."""
        return items[int(self.rng.integers(len(items)))]

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def target(self) -> Pair:
        """The colour and shape to ask about."""
        return self.one(sorted(UNSEEN)) if self.unseen else self.one(self.allowed)

    def others(self, count: int, keep: Callable[[Pair], bool]) -> list[Pair]:
        """Allowed pairs that pass, repetition possible."""
        passing = [pair for pair in self.allowed if keep(pair)]
        return [self.one(passing) for _ in range(count)]

    def distinct(self, first: Pair, count: int) -> list[Pair]:
        """`count` pairs that begin with `first` and share neither a colour nor a shape."""
        pairs = [first]
        while len(pairs) < count:
            used = {word for pair in pairs for word in pair}
            passing = [pair for pair in self.allowed if not used & set(pair)]
            pairs.append(self.one(passing))
        return pairs

    def name_of(self, pair: Pair) -> Noun:
        """A way to name a thing whose colour and shape are both its own."""
        return self.one((pair, pair, (pair[0], "thing"), (None, pair[1])))

    def scene(self, size: tuple[int, int], pairs: Sequence[Pair], boxes: Sequence[Box]) -> Scene:
        """A scene of things in boxes, in any order of drawing."""
        background = self.background([colour for colour, _ in pairs])
        things = [self.thing(pair, box, background) for pair, box in zip(pairs, boxes, strict=True)]
        return Scene(size=size, background=background, things=tuple(things))

    def background(self, colours: Sequence[str]) -> str:
        """A background on which these colours stand out."""
        return self.one([kind for kind in _BACKGROUNDS if kind not in colours])

    def thing(self, pair: Pair, box: Box, background: str) -> Thing:
        """A thing, a little turned or outlined now and then."""
        colour, shape = pair
        side = min(box[2] - box[0], box[3] - box[1])
        most = _TURNS.get(shape, 0.0) if self.rng.random() < 0.4 and side >= _LEAST_TURNED else 0.0
        outlines = [name for name in ("black", "white") if name not in (colour, background)]
        outlined = self.rng.random() < _OUTLINED and shape != "ring" and side >= _LEAST_OUTLINED
        return Thing(
            colour=colour,
            shape=shape,
            box=box,
            turn=self.rng.uniform(-most, most),
            outline=self.one(outlines) if outlined and outlines else None,
        )

    def lettering(self) -> Lettering:
        """Pillow's font as it comes, the same in other proportions, or its bitmap font."""
        look = self.rng.random()
        if look < 0.35:
            return Lettering()
        return Lettering(
            bitmap=bool(look > 0.85),
            weight=max(0.0, self.rng.uniform(-0.06, 0.1)),
            spacing=max(0.0, self.rng.uniform(-0.2, 0.2)),
            stretch=self.rng.uniform(0.8, 1.2),
            slant=max(0.0, self.rng.uniform(-0.25, 0.25)),
            turn=self.rng.uniform(-5, 5) if self.rng.random() < 0.4 else 0.0,
        )

    def scattered(self, pairs: Sequence[Pair]) -> Scene:
        """A scene with things anywhere."""
        size = layout.pick_size(self.rng)
        return self.scene(size, pairs, layout.scatter(self.rng, size, len(pairs)))

    def in_thirds(self, pairs: Sequence[Pair]) -> tuple[Scene, list[tuple[int, int]]]:
        """A scene with things in different ninths of the image, and the (row, column) of each."""
        size = layout.pick_size(self.rng, most_aspect=2.0)
        cells = [(int(cell) // 3, int(cell) % 3) for cell in self.rng.permutation(9)[: len(pairs)]]
        boxes = [layout.box_in(self.rng, size, (3, 3), (column, row), 0.6) for row, column in cells]
        return self.scene(size, pairs, boxes), cells


def _colour(world: World) -> Draft:
    target = world.target()
    scene = world.scattered(world.distinct(target, world.number(1, 4)))
    return Draft(form="colour", meaning=Meaning(noun=target), choice=target[0], scenes=(scene,), pair=target)


def _shape(world: World) -> Draft:
    target = world.target()
    least = 4 if world.variant == "negative" else 1  # so that taking one colour for another is a mistake
    scene = world.scattered(world.distinct(target, world.number(least, 4)))
    return Draft(form="shape", meaning=Meaning(noun=target), choice=target[1], scenes=(scene,), pair=target)


def _count(world: World) -> Draft:
    target, count = world.target(), world.number(1, _MOST_COUNT)
    colour, shape = target
    names: tuple[Noun, ...] = (target, (None, shape), (colour, "thing"), (None, "thing"))
    if world.unseen:
        names = (target,)
    elif world.variant == "negative":
        names = ((colour, "thing"),)
    noun = world.one(names)
    counted = (
        [target, *world.others(count - 1, lambda pair: matches(pair, noun))] if not world.unseen else [target] * count
    )
    # Of blue squares, squares that are not blue and blue things that are not square tell most.
    near = noun == target and world.rng.random() < _NEAR
    rest: list[Pair] = []
    if noun != (None, "thing"):
        rest = world.others(
            world.number(0, 2), lambda pair: not matches(pair, noun) and (not near or bool({*pair} & {*target}))
        )
    return Draft(
        form="count",
        meaning=Meaning(noun=noun, count=count),
        choice=str(count),
        scenes=(world.scattered(counted + rest),),
        pair=target,
    )


def matches(pair: Pair, noun: Noun) -> bool:
    """Whether a thing may be called so."""
    return noun[0] in (None, pair[0]) and noun[1] in ("thing", pair[1])


def _position(world: World) -> Draft:
    target = world.target()
    if world.rng.random() < 0.35:
        return _side(world, target)
    scene, cells = world.in_thirds(world.distinct(target, world.number(1, 4)))
    meaning = Meaning(noun=world.name_of(target), position=cells[0])
    return Draft(form="position", meaning=meaning, choice=str(cells[0]), scenes=(scene,), pair=target)


def _side(world: World, target: Pair) -> Draft:
    side = world.number(0, 3)
    pairs = world.distinct(target, 2)
    size = layout.pick_size(world.rng, most_aspect=1.5)
    scene = world.scene(size, pairs, layout.facing(world.rng, size, side))
    meaning = Meaning(noun=world.name_of(target), other=world.name_of(pairs[1]), side=side)
    return Draft(form="side", meaning=meaning, choice=str(side), scenes=(scene,), pair=target)


def _number(world: World) -> Draft:
    digits = world.number(1, 4)
    low = 10 ** (digits - 1) if digits > 1 else 0
    number = world.number(1, _MOST_ROMAN) if world.variant == "roman" else world.number(low, 10**digits - 1)
    return _printed(world, "number", str(number))


def _word(world: World) -> Draft:
    word = world.one(PRINTED_WORDS)
    return _printed(world, "word", world.one((word, word.upper(), word.capitalize())))


def _printed(world: World, form: str, text: str) -> Draft:
    style = world.lettering()
    while True:
        size = layout.pick_size(world.rng, most_aspect=2.5)
        least, most = layout.least_letter(size), 0.95 * largest_letter(text, style, size)
        if least <= most:
            break
    colour = world.one(_LABEL_COLOURS)
    label = Label(
        text=text,
        colour=colour,
        letter=world.rng.uniform(least, max(least, min(most, 0.6 * size[1], 4 * least))),
        place=(world.rng.uniform(0.02, 0.98), world.rng.uniform(0.02, 0.98)),
        style=style,
    )
    scene = Scene(size=size, background=world.background([colour]), label=label)
    return Draft(form=form, meaning=Meaning(text=text), choice=text.lower(), scenes=(scene,))


def _compare(world: World) -> Draft:
    images = 2 if world.rng.random() < 0.65 else 3
    makers = (_which, _which, _colour_in) if world.unseen else (_which, _which, _colour_in, _most, _shared)
    return world.one(makers)(world, images)


def _which(world: World, images: int) -> Draft:
    target = world.target()
    noun = world.one((target, target, (target[0], "thing"), (None, target[1]))) if not world.unseen else target
    choice = world.number(0, images + (0 if world.unseen else 1))  # an image, all of them, none of them
    answers = {images: "which all", images + 1: "which none"}
    scenes = []
    for number in range(images):
        shown = choice in (number, images)
        rest = world.others(world.number(1, 3) - shown, lambda pair: not matches(pair, noun))
        scenes.append(world.scattered([target] * shown + rest))
    return Draft(
        form="which",
        answered_as=answers.get(choice),
        meaning=Meaning(noun=noun, ordinal=choice if choice < images else 0),
        choice=f"{choice if choice < images else answers[choice]}",
        scenes=tuple(scenes),
        pair=target,
    )


def _colour_in(world: World, images: int) -> Draft:
    target, asked = world.target(), world.number(0, images - 1)
    scenes = []
    for number in range(images):
        first = target if number == asked else world.one([pair for pair in world.allowed if pair[1] == target[1]])
        scenes.append(world.scattered(world.distinct(first, world.number(1, 2))))
    meaning = Meaning(noun=target, ordinal=asked)
    return Draft(form="colour in", meaning=meaning, choice=target[0], scenes=tuple(scenes), pair=target)


def _most(world: World, images: int) -> Draft:
    most, winner = world.number(2, 5), world.number(0, images - 1)
    scenes = []
    for number in range(images):
        count = most if number == winner else world.number(1, most - 1)
        scenes.append(world.scattered(world.others(count, lambda pair: True)))
    meaning = Meaning(ordinal=winner, count=most)
    return Draft(form="most", meaning=meaning, choice=f"{winner} {most}", scenes=tuple(scenes))


def _shared(world: World, images: int) -> Draft:
    shape, *rest = (SHAPES[number] for number in world.rng.permutation(len(SHAPES)))
    extra = 1 if images == 3 else world.number(1, 2)
    scenes = []
    for number in range(images):
        shapes = [shape, *rest[number * extra : (number + 1) * extra]]
        pairs = [world.one([pair for pair in world.allowed if pair[1] == each]) for each in shapes]
        scenes.append(world.scattered(pairs))
    return Draft(form="shared", meaning=Meaning(noun=(None, shape)), choice=shape, scenes=tuple(scenes))


def _grounding(world: World) -> Draft:
    target = world.target()
    pairs = world.distinct(target, world.number(1, 3))
    while True:
        size = layout.pick_size(world.rng, most_aspect=2.0)
        boxes = [layout.snap(box, size) for box in layout.scatter(world.rng, size, len(pairs))]
        if layout.stand_apart(boxes) and all(layout.looks_regular(box, size) for box in boxes):
            break
    box = layout.coordinates(boxes[0], size)
    meaning = Meaning(noun=world.name_of(target), box=box)
    scene = world.scene(size, pairs, boxes)
    return Draft(form="box", meaning=meaning, choice=str(box), scenes=(scene,), pair=target)


def _chat(world: World) -> Draft:
    target = world.target()
    pairs = world.distinct(target, world.number(2, 3))
    scene, cells = world.in_thirds(pairs)
    form = world.one(("then position", "then shape", "then colour"))
    if form == "then position":
        first, choice = world.one(("colour", "shape")), str(cells[0])
        before = Meaning(noun=target)
    else:
        first, before = form.removeprefix("then "), Meaning(noun=pairs[1])
        choice = target[first == "shape"]
    meaning = Meaning(noun=target, position=cells[0])
    return Draft(form=form, meaning=meaning, choice=choice, scenes=(scene,), before=(first, before), pair=target)


def _text(world: World) -> Draft:
    form = world.one(("sum", "after", "before", "talk"))
    total = world.number(2, 9)
    first = {"sum": world.number(1, total - 1), "after": total - 1, "before": total + 1, "talk": 0}[form]
    meaning = Meaning(count=total, addends=(first, total - first if form == "sum" else 0))
    return Draft(form=form, meaning=meaning, choice=str(total))


MAKERS: dict[str, Callable[[World], Draft]] = {
    "colour": _colour,
    "shape": _shape,
    "count": _count,
    "position": _position,
    "number": _number,
    "word": _word,
    "compare": _compare,
    "grounding": _grounding,
    "chat": _chat,
    "text": _text,
}
