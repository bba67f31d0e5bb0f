"""Text that a person wrote becomes a number, if it is plainly one. Names are those that argparse shows.

Python's own readers also take "1_0", " 1", "+1" and digits of other scripts: slips or tricks, where a number belongs.
"""

from __future__ import annotations

import math
import re

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")


def integer(text: str) -> int:
    """The integer that is written in decimal digits, perhaps behind a minus.

    Raises:
        ValueError: it is something else, or has thousands of digits.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is no integer in decimal digits")
    return int(text)


def number(text: str) -> float:
    """The finite number that is written in decimal digits, perhaps with a point and an exponent.

    Raises:
        ValueError: it is something else, or too large.
    """
    if not _NUMBER.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]!r} is no finite number in decimal digits")
    return value
