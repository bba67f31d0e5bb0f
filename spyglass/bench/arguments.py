"""What several benchmarks ask of their command lines."""

from __future__ import annotations

import argparse

from spyglass.config.fields import integer


def positive(text: str) -> int:
    """An option's value that counts something of which there must be one at least."""
    try:
        value = integer(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value
