"""`spyglass pull ORG/NAME[@revision]`: download a model of the hub, or what is newer of it."""

from __future__ import annotations

import argparse

from spyglass.cli.options import add_model, required_model
from spyglass.config.hub import pull, read_hub_id
from spyglass.config.shipped import shipped_models
from spyglass.errors import ConfigError

HELP = "Download a model of the Hugging Face hub into the hub's own cache, checked, or what is newer of it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "spyglass pull ORG/NAME[@revision]"
    parser.epilog = (
        "HF_HOME says where to, HF_TOKEN opens models that need a token, HF_ENDPOINT names another hub, "
        "HF_HUB_OFFLINE=1 forbids asking any. docs/models.md says more."
    )
    add_model(parser, default=False)


def run(args: argparse.Namespace) -> int:
    """Download; print the folder."""
    stated = required_model(args, "pull")
    if stated in shipped_models():
        raise ConfigError(f"{stated} comes with the package; there is nothing to download")
    if (hub := read_hub_id(stated)) is None:
        raise ConfigError(f"{stated!r} is no hub id; expected ORG/NAME or ORG/NAME@revision")
    print(pull(hub))
    return 0
