"""The command line changes on purpose only: every verb's options stand in `frozen_cli.txt`.

After a deliberate change run `python -m tests.rules.test_frozen_cli`, read the diff, commit it with a changelog line.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

from spyglass.cli.main import VERBS, build_parser, load_verb

FROZEN = Path(__file__).with_name("frozen_cli.txt")


def describe(action: argparse.Action) -> str:
    """One line: spellings, choices and default of an option or positional."""
    words = ["/".join(action.option_strings) or action.dest]
    if action.choices is not None:
        words.append("{" + ",".join(str(choice) for choice in action.choices) + "}")
    if action.default not in (None, argparse.SUPPRESS):
        words.append(f"default {action.default}")
    if action.required and action.option_strings:
        words.append("required")
    return "  " + " ".join(words)


def current() -> str:
    """The command line as it is now."""
    lines = []
    for verb in VERBS:
        lines.append(f"spyglass {verb}")
        parser = build_parser(verb, load_verb(verb))
        lines += [describe(action) for action in parser._actions if action.dest != "help"]
    return "\n".join(lines) + "\n"


def test_no_option_appears_changes_or_vanishes_unnoticed() -> None:
    frozen = FROZEN.read_text(encoding="utf-8")
    difference = difflib.unified_diff(frozen.splitlines(), current().splitlines(), "frozen", "current", lineterm="")
    assert frozen == current(), "\n".join(difference)


if __name__ == "__main__":
    FROZEN.write_text(current(), encoding="utf-8")
