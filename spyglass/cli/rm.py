"""`spyglass rm ORG/NAME[@revision]`: delete a downloaded model."""

from __future__ import annotations

import argparse

from spyglass.cli.options import add_model, required_model
from spyglass.config.hub import read_hub_id, remove
from spyglass.errors import ConfigError
from spyglass.progress import shown_bytes

HELP = "Delete a downloaded model from the hub's cache: all of its revisions, or the one that is named."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "spyglass rm ORG/NAME[@revision]"
    add_model(parser, default=False)


def run(args: argparse.Namespace) -> int:
    """Delete; say how much is free now."""
    stated = required_model(args, "rm")
    if (hub := read_hub_id(stated)) is None:
        raise ConfigError(f"{stated!r} is no hub id (ORG/NAME); folders and shipped models are not deleted")
    print(f"{hub} deleted, {shown_bytes(remove(hub))} freed")
    return 0
