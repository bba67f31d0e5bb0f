"""The answers' words in French, for the adapter that answers so; the questions stay English."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spyglass.tiny_world import words

if TYPE_CHECKING:
    from spyglass.tiny_world.phrasing import Meaning, Noun


def slots(meaning: Meaning) -> dict[str, str]:
    """The French words of a meaning, by slot."""
    colour, shape = meaning.noun
    count, gender = meaning.count, words.FRENCH_SHAPES[shape][3]
    counted = "une" if count == 1 and gender else words.FRENCH_COUNTS[count]
    found = {
        "pronoun": ("il", "elle")[gender],
        "colour": words.FRENCH_COLOURS[colour][gender] if colour else "",
        "shape": words.FRENCH_SHAPES[shape][0],
        "the_shape": words.FRENCH_SHAPES[shape][1],
        "a_shape": f"{('un', 'une')[gender]} {words.FRENCH_SHAPES[shape][0]}",
        "noun": _noun(meaning.noun, ""),
        "a_noun": _noun(meaning.noun, "a"),
        "the_noun": _noun(meaning.noun, "the"),
        "the_thing": _noun((colour, "thing"), "the"),
        "of_other": _of(_noun(meaning.other, "the")),
        "counted": _noun(meaning.noun, "" if count == 1 else "many"),
        "count": counted,
        "position": words.FRENCH_POSITIONS[meaning.position[0]][meaning.position[1]],
        "side": words.FRENCH_SIDES[meaning.side],
        "ordinal": words.FRENCH_ORDINALS[meaning.ordinal],
    }
    return found | {text[:1].upper() + text[1:]: value[:1].upper() + value[1:] for text, value in found.items()}


def _noun(noun: Noun, article: str) -> str:
    colour, shape = noun
    singular, with_the, plural, gender = words.FRENCH_SHAPES[shape]
    head = {"": singular, "the": with_the, "a": f"{('un', 'une')[gender]} {singular}", "many": plural}[article]
    if colour is None:
        return head
    adjective = words.FRENCH_COLOURS[colour][gender]
    return f"{head} {adjective}" + ("s" if article == "many" and adjective != "orange" else "")


def _of(with_the: str) -> str:
    """ "of the ...": du, de la, de l'."""
    return "du " + with_the.removeprefix("le ") if with_the.startswith("le ") else "de " + with_the
