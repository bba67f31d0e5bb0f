"""What a question is about (`Meaning`), and the words that this puts into the slots of questions and answers."""

from __future__ import annotations

from dataclasses import dataclass

from spyglass.tiny_world import french, words
from spyglass.tiny_world.questions import ANSWERS, SAME_ANSWERS, TALK, Manner
from spyglass.tiny_world.words import Variant

Noun = tuple[str | None, str]  # colour or None, shape or "thing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The facts behind one question; a form uses only some of them.

    `noun` is what the question names, `colour` and `shape` what it asks for or names alone, `other` a second noun.
    `position` is (row, column) of thirds, `side` and `ordinal` count from 0, `text` is what is printed, `box` is in
    the models' coordinates, `addends` are those of a sum.
    """

    noun: Noun = (None, "thing")
    other: Noun = (None, "thing")
    position: tuple[int, int] = (0, 0)
    side: int = 0
    count: int = 0
    ordinal: int = 0
    text: str = ""
    box: tuple[int, int, int, int] = (0, 0, 0, 0)
    addends: tuple[int, int] = (0, 0)


def ask(template: str, meaning: Meaning) -> str:
    """The question of a wording."""
    return template.format_map(_slots(meaning, roman=False))


def answer(form: str, manner: Manner, template: str, meaning: Meaning, variant: Variant | None) -> str:
    """The one right answer. `form` may be that of an answer only ("which none")."""
    if form == "talk":
        return TALK[template][variant == "french"]
    english, in_french = ANSWERS[SAME_ANSWERS.get(form, form)][manner]
    if variant == "french":
        return in_french.format_map(_slots(meaning, roman=False) | french.slots(meaning))
    return english.format_map(_slots(meaning, roman=variant == "roman"))


def noun_text(noun: Noun) -> str:
    """ "red circle", "red thing", "circle" or "thing"."""
    return " ".join(part for part in noun if part is not None)


def sight(pairs: list[Noun]) -> str:
    """A sentence that lists things, equal ones together, in the order of colours and shapes."""
    order = {(colour, shape): 0 for colour in words.COLOURS for shape in words.SHAPES}
    for pair in pairs:
        order[pair] += 1  # type: ignore[index]  # things have colours
    told = [
        f"{words.COUNTS[count]} {noun_text((colour, shape if count == 1 else words.plural(shape)))}"
        for (colour, shape), count in order.items()
        if count
    ]
    return "I see " + " and ".join([", ".join(told[:-1])] * (len(told) > 1) + told[-1:]) + "."


def capital(text: str) -> str:
    """The text with a capital at its beginning."""
    return text[:1].upper() + text[1:]


def _slots(meaning: Meaning, *, roman: bool) -> dict[str, str]:
    colour, shape = meaning.noun
    noun, count = noun_text(meaning.noun), meaning.count
    counted = words.roman(count) if roman and count else words.COUNTS[count]
    number = words.roman(int(meaning.text)) if roman and meaning.text.isdigit() else meaning.text
    position = words.POSITIONS[meaning.position[0]][meaning.position[1]]
    first, second = meaning.addends
    slots = {
        "colour": colour or "",
        "a_colour": words.a(colour) if colour else "",
        "shape": shape,
        "a_shape": words.a(shape),
        "noun": noun,
        "a_noun": words.a(noun),
        "nouns": noun_text((colour, words.plural(shape))),
        "counted": noun if count == 1 else noun_text((colour, words.plural(shape))),
        "are": "is" if count == 1 else "are",
        "count": counted,
        "other": noun_text(meaning.other),
        "position": position,
        "side": words.SIDES[meaning.side],
        "ordinal": words.ORDINALS[meaning.ordinal],
        "number": number,
        "word": meaning.text.lower(),
        "box": f"[[{', '.join(map(str, meaning.box))}]]",
        "first": words.COUNTS[first],
        "second": words.COUNTS[second],
    }
    return slots | {capital(name): capital(text) for name, text in slots.items()}
