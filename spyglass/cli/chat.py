"""`spyglass chat [MODEL]`: talk to a model in the terminal, with images, commands and a history of what was typed."""

from __future__ import annotations

import argparse

from spyglass.cli.options import add_model
from spyglass.cli.run import add_talk_options, chat

HELP = "Talk to a model in the terminal; /help lists what can be said to the program itself."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: those of `run` that are about a conversation."""
    parser.usage = "spyglass chat [options] [MODEL]"
    add_model(parser)
    add_talk_options(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model and talk until the end of input."""
    return chat(args)
