"""`spyglass show MODEL`: what a model is, from its configuration and the headers of its files."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from spyglass.cli.options import add_model, required_model
from spyglass.config.hub import hub_name
from spyglass.config.read import read_model_config
from spyglass.config.shipped import SHIPPED, find_model, model_name, shipped_adapters
from spyglass.families import FAMILIES
from spyglass.progress import shown_bytes

HELP = "Say what a model is: size, layers, context length, images, formats, adapters, licence."
_LICENCE = re.compile(r"^license(?:_name)?:[ \t]*(\S.*)$", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model(parser, default=False)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = describe(find_model(required_model(args, "show")))
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else ", ".join(value) if isinstance(value, list) else str(value)
        print(f"{name:<{width}}  {shown}")
    return 0


def describe(folder: Path) -> dict[str, Any]:
    """The facts about the model in a folder, by what they are called.

    Raises:
        ConfigError, CheckpointError: it is no checkpoint that Spyglass reads.
    """
    from spyglass.checkpoint.match import match
    from spyglass.checkpoint.safetensors import open_checkpoint
    from spyglass.params.table import param_table

    config, checkpoint = read_model_config(folder), open_checkpoint(folder)
    table = param_table(config)
    matched = match(checkpoint, table)
    text, vision = config.text, config.vision
    formats = Counter(str(source.format) for source in matched.sources.values())
    seen = f"yes, up to {vision.max_tokens} tokens each" if vision is not None else "no, text only"
    return {
        "model": model_name(folder),
        "folder": str(folder),
        "from": _origin(folder),
        "licence": _licence(folder),
        "family": FAMILIES[config.family].title,
        "parameters": sum(math.prod(param.shape) for name, param in table.items() if name in matched.sources),
        "size": shown_bytes(checkpoint.nbytes),
        "formats": [name for name, _ in formats.most_common()],
        "layers": text.num_hidden_layers,
        "hidden size": text.hidden_size,
        "experts": f"{text.num_experts_per_tok} of {text.n_routed_experts} per token, and one shared",
        "context length": text.max_position_embeddings,
        "vocabulary": text.vocab_size,
        "images": seen,
        "adapters": list(shipped_adapters(folder)) or "none come with it",
    }


def _origin(folder: Path) -> str:
    if hub_name(folder) is not None:
        return f"the hub, commit {folder.resolve().name}"
    return "the package" if folder.resolve().parent == SHIPPED else "a folder of yours"


def _licence(folder: Path) -> str:
    """What the model's card states, or that a text lies beside the files."""
    card = folder / "README.md"
    if card.is_file() and (found := _LICENCE.search(card.read_text(encoding="utf-8", errors="replace"))):
        return found[1].strip()
    if folder.resolve().parent == SHIPPED:
        return "that of the package"
    texts = sorted(path.name for path in folder.glob("LICENSE*"))
    return f"see {texts[0]}" if texts else "not stated"
