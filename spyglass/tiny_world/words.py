"""The closed vocabulary of the tiny world: what there is, what may be printed, and how both are said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Variant = Literal["roman", "negative", "french"]
VARIANTS: tuple[Variant, ...] = ("roman", "negative", "french")

Rgb = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shades:
    """What a colour's name means: every RGB value from `low` to `high` in all channels, both included; `pure` ones are
    what people draw with."""

    low: Rgb
    high: Rgb
    pure: tuple[Rgb, ...]


COLOURS: dict[str, Shades] = {
    "red": Shades(low=(185, 0, 0), high=(255, 65, 65), pure=((255, 0, 0), (220, 20, 60))),
    "orange": Shades(low=(238, 112, 0), high=(255, 168, 45), pure=((255, 165, 0), (255, 140, 0))),
    "yellow": Shades(low=(235, 210, 0), high=(255, 255, 70), pure=((255, 255, 0), (255, 215, 0))),
    "green": Shades(low=(0, 125, 0), high=(50, 255, 72), pure=((0, 255, 0), (0, 128, 0))),
    "blue": Shades(low=(0, 0, 178), high=(65, 112, 255), pure=((0, 0, 255), (65, 105, 225))),
    "purple": Shades(low=(112, 0, 110), high=(165, 60, 240), pure=((128, 0, 128), (160, 32, 240))),
    "black": Shades(low=(0, 0, 0), high=(26, 26, 26), pure=((0, 0, 0),)),
    "white": Shades(low=(242, 242, 242), high=(255, 255, 255), pure=((255, 255, 255),)),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
# Pairs that no image and no sentence of the split "train" ever holds; each shape once, six of the colours once.
UNSEEN = frozenset(
    {
        ("red", "star"),
        ("orange", "ring"),
        ("green", "square"),
        ("blue", "triangle"),
        ("purple", "circle"),
        ("yellow", "cross"),
    }
)

COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ORDINALS = ("first", "second", "third")
POSITIONS = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
SIDES = ("left of", "right of", "above", "below")
PRINTED_WORDS = (
    "apple", "baby", "ball", "bed", "bike", "bird", "boat", "book", "box", "bread", "bus", "cake", "car", "cat",
    "cow", "cup", "day", "dog", "door", "duck", "egg", "eye", "fish", "fire", "foot", "fox", "game", "girl", "goat",
    "hand", "hat", "home", "horse", "ice", "jam", "key", "king", "lamp", "leaf", "lion", "milk", "moon", "mouse",
    "nest", "night", "nose", "park", "pig", "queen", "rain", "road", "salt", "sea", "ship", "shop", "snow", "sun",
    "tree", "water", "zoo",
)  # fmt: skip

FRENCH_COLOURS = {  # masculine, feminine
    "red": ("rouge", "rouge"),
    "orange": ("orange", "orange"),
    "yellow": ("jaune", "jaune"),
    "green": ("vert", "verte"),
    "blue": ("bleu", "bleue"),
    "purple": ("violet", "violette"),
    "black": ("noir", "noire"),
    "white": ("blanc", "blanche"),
}
FRENCH_SHAPES = {  # noun, with its article, plural, gender (0 masculine, 1 feminine)
    "circle": ("cercle", "le cercle", "cercles", 0),
    "square": ("carré", "le carré", "carrés", 0),
    "triangle": ("triangle", "le triangle", "triangles", 0),
    "star": ("étoile", "l'étoile", "étoiles", 1),
    "cross": ("croix", "la croix", "croix", 1),
    "ring": ("anneau", "l'anneau", "anneaux", 0),
    "thing": ("objet", "l'objet", "objets", 0),
}
FRENCH_COUNTS = ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix")
FRENCH_ORDINALS = ("première", "deuxième", "troisième")
FRENCH_POSITIONS = (
    ("en haut à gauche", "en haut", "en haut à droite"),
    ("à gauche", "au milieu", "à droite"),
    ("en bas à gauche", "en bas", "en bas à droite"),
)
FRENCH_SIDES = ("à gauche", "à droite", "au-dessus", "en dessous")
_ROMAN = ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def plural(noun: str) -> str:
    """The plural of a shape or of "thing"."""
    return noun + ("es" if noun.endswith("s") else "s")


def a(noun: str) -> str:
    """A noun, or an adjective and a noun, behind "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def roman(number: int) -> str:
    """Roman numerals of 1 to 399."""
    assert 0 < number < 400, number
    out = ""
    for value, letters in _ROMAN:
        out += letters * (number // value)
        number %= value
    return out
