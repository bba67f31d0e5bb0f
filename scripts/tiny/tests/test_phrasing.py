"""The same meaning in English, with Roman numerals and in French, against sentences written out here."""

from __future__ import annotations

import pytest

from spyglass.tiny_world.phrasing import Meaning, answer, ask, sight
from spyglass.tiny_world.questions import ANSWERS, KINDS, QUESTIONS, TALK, Manner
from spyglass.tiny_world.words import (
    COLOURS,
    COUNTS,
    FRENCH_COLOURS,
    FRENCH_COUNTS,
    FRENCH_SHAPES,
    SHAPES,
    plural,
    roman,
)


@pytest.mark.parametrize(
    ("form", "manner", "meaning", "english", "french"),
    [
        ("colour", "plain", Meaning(noun=("white", "star")), "It is white.", "Elle est blanche."),
        ("colour", "sentence", Meaning(noun=("green", "cross")), "The cross is green.", "La croix est verte."),
        ("colour", "sentence", Meaning(noun=("black", "ring")), "The ring is black.", "L'anneau est noir."),
        ("colour in", "brief", Meaning(noun=("orange", "circle")), "Orange.", "Orange."),
        ("shape", "plain", Meaning(noun=("red", "star")), "It is a star.", "C'est une étoile."),
        (
            "shape",
            "sentence",
            Meaning(noun=("green", "cross")),
            "The green thing is a cross.",
            "L'objet vert est une croix.",
        ),
        (
            "count",
            "sentence",
            Meaning(noun=("black", "ring"), count=3),
            "There are three black rings.",
            "Il y a trois anneaux noirs.",
        ),
        ("count", "sentence", Meaning(noun=(None, "star"), count=1), "There is one star.", "Il y a une étoile."),
        (
            "count",
            "sentence",
            Meaning(noun=("orange", "thing"), count=2),
            "There are two orange things.",
            "Il y a deux objets orange.",
        ),
        ("count", "brief", Meaning(noun=(None, "cross"), count=6), "Six.", "Six."),
        (
            "position",
            "sentence",
            Meaning(noun=("blue", "thing"), position=(2, 0)),
            "The blue thing is at the bottom left.",
            "L'objet bleu est en bas à gauche.",
        ),
        (
            "position",
            "plain",
            Meaning(noun=(None, "cross"), position=(1, 1)),
            "It is in the middle.",
            "Elle est au milieu.",
        ),
        ("then position", "brief", Meaning(position=(0, 1)), "At the top.", "En haut."),
        (
            "side",
            "sentence",
            Meaning(noun=(None, "ring"), other=(None, "star"), side=0),
            "The ring is left of the star.",
            "L'anneau est à gauche de l'étoile.",
        ),
        (
            "side",
            "sentence",
            Meaning(noun=("red", "star"), other=(None, "square"), side=2),
            "The red star is above the square.",
            "L'étoile rouge est au-dessus du carré.",
        ),
        (
            "side",
            "sentence",
            Meaning(noun=(None, "circle"), other=("green", "cross"), side=3),
            "The circle is below the green cross.",
            "Le cercle est en dessous de la croix verte.",
        ),
        ("side", "plain", Meaning(noun=(None, "star"), side=1), "It is right of it.", "Elle est à droite."),
        ("number", "plain", Meaning(text="47"), "It says 47.", "On lit 47."),
        ("word", "brief", Meaning(text="APPLE"), "apple.", "apple."),
        ("which", "plain", Meaning(ordinal=1), "The second one.", "La deuxième."),
        (
            "which",
            "sentence",
            Meaning(noun=("yellow", "star"), ordinal=0),
            "The first picture shows a yellow star.",
            "La première image montre une étoile jaune.",
        ),
        (
            "which none",
            "sentence",
            Meaning(noun=(None, "ring")),
            "No picture shows a ring.",
            "Aucune image ne montre un anneau.",
        ),
        ("which all", "brief", Meaning(), "All.", "Toutes."),
        (
            "most",
            "sentence",
            Meaning(ordinal=2, count=4),
            "The third picture has four things.",
            "La troisième image a quatre objets.",
        ),
        (
            "shared",
            "sentence",
            Meaning(noun=(None, "cross")),
            "All pictures show a cross.",
            "Toutes les images montrent une croix.",
        ),
        ("sum", "plain", Meaning(count=7), "It is seven.", "C'est sept."),
        (
            "box",
            "plain",
            Meaning(noun=("red", "star"), box=(50, 100, 300, 950)),
            "<｜ref｜>red star<｜/ref｜><｜box｜>[[50, 100, 300, 950]]<｜/box｜>",
            "<｜ref｜>étoile rouge<｜/ref｜><｜box｜>[[50, 100, 300, 950]]<｜/box｜>",
        ),
    ],
)
def test_a_meaning_has_one_sentence_in_each_language(
    form: str, manner: Manner, meaning: Meaning, english: str, french: str
) -> None:
    assert answer(form, manner, "", meaning, None) == answer(form, manner, "", meaning, "negative") == english
    assert answer(form, manner, "", meaning, "french") == french


def test_roman_numerals_replace_numbers_and_nothing_else() -> None:
    assert answer("count", "plain", "", Meaning(count=4), "roman") == "There are IV."
    assert answer("count", "sentence", "", Meaning(noun=(None, "ring"), count=1), "roman") == "There is I ring."
    assert answer("number", "plain", "", Meaning(text="47"), "roman") == "It says XLVII."
    assert answer("colour", "plain", "", Meaning(noun=("red", "star")), "roman") == "It is red."
    known = {1: "I", 4: "IV", 9: "IX", 14: "XIV", 40: "XL", 49: "XLIX", 90: "XC", 99: "XCIX", 388: "CCCLXXXVIII"}
    assert {number: roman(number) for number in known} == known


def test_every_wording_can_be_asked_and_leaves_no_slot_open() -> None:
    meaning = Meaning(noun=("orange", "star"), other=(None, "cross"), ordinal=1, count=3, addends=(1, 2))
    for forms in KINDS.values():
        for form in forms:
            for template in QUESTIONS[form]:
                text = ask(template, meaning)
                assert "{" not in text and "  " not in text and text[0].isupper() and text[-1] in ".?!"
    assert ask("There is {a_noun} here. Where is it?", meaning) == "There is an orange star here. Where is it?"
    assert ask("Count the {nouns}.", Meaning(noun=(None, "cross"))) == "Count the crosses."
    assert ask("I see {a_colour} thing. What is it?", meaning) == "I see an orange thing. What is it?"
    assert [plural(shape) for shape in ("cross", "star", "thing")] == ["crosses", "stars", "things"]


def test_small_talk_has_its_own_answers() -> None:
    assert set(TALK) == set(QUESTIONS["talk"])
    assert answer("talk", "plain", "Thank you!", Meaning(), None) == "You are welcome."
    assert answer("talk", "plain", "Thank you!", Meaning(), "french") == "De rien."


def test_what_is_seen_is_listed_by_colour_and_shape() -> None:
    assert sight([("blue", "star"), ("red", "ring"), ("blue", "star")]) == "I see one red ring and two blue stars."
    three: list[tuple[str | None, str]] = [("white", "cross"), ("red", "star"), ("red", "circle")]
    assert sight(three) == "I see one red circle, one red star and one white cross."
    assert sight([("black", "cross")] * 3) == "I see three black crosses."


def test_every_word_has_its_french() -> None:
    assert set(FRENCH_COLOURS) == set(COLOURS) and set(FRENCH_SHAPES) == {*SHAPES, "thing"}
    assert len(FRENCH_COUNTS) == len(COUNTS)
    assert all(len(texts) == 2 for manners in ANSWERS.values() for texts in manners.values())
