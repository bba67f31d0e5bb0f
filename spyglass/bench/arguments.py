"""What several benchmarks ask of their command lines."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An option's value that counts something of which there must be one at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
