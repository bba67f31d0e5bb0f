"""`spyglass list`: the models that are here, those that come with the package and those downloaded from the hub."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from spyglass.config.hub import HubId, downloaded_folder, downloads
from spyglass.config.read import read_model_config
from spyglass.config.shipped import SHIPPED, shipped_adapters, shipped_models
from spyglass.errors import ConfigError
from spyglass.progress import shown_bytes

HELP = "Show the models that are here: those that come with the package and those downloaded from the hub."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Print a line a model."""
    rows = [_shipped(name) for name in shipped_models()] + _downloaded()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = [("MODEL", "SIZE", "FAMILY", "WHERE FROM")]
    table += [(row["model"], shown_bytes(row["bytes"]), row["family"], row["from"]) for row in rows]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    for line in table:
        print("  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[3]]))
    return 0


def _shipped(name: str) -> dict[str, Any]:
    folder = SHIPPED / name
    adapters = shipped_adapters(folder)
    told = "the package" + (f", with the adapters {', '.join(adapters)}" if adapters else "")
    nbytes = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    return {
        "model": name,
        "bytes": nbytes,
        "family": read_model_config(folder).family,
        "from": told,
        "folder": str(folder),
    }


def _downloaded() -> list[dict[str, Any]]:
    """Models in the hub's cache that Spyglass reads; other programs keep theirs in the same one."""
    rows = []
    for entry in downloads():
        try:
            family = read_model_config(entry.folder).family
        except ConfigError:
            continue
        whole = downloaded_folder(HubId(entry.repo, entry.commit)) is not None
        told = f"the hub, {', '.join(entry.refs) or 'an older revision'} at {entry.commit[:12]}"
        rows.append(
            {
                "model": entry.repo if "main" in entry.refs else f"{entry.repo}@{(*entry.refs, entry.commit[:12])[0]}",
                "bytes": entry.nbytes,
                "family": family,
                "from": told + ("" if whole else " (in part: `spyglass pull` goes on)"),
                "folder": str(Path(entry.folder)),
            }
        )
    return rows
