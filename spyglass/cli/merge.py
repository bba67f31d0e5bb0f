"""`spyglass merge MODEL --lora DIR --output DIR`: a checkpoint with an adapter merged into its weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from spyglass.cli.options import add_model, note_bases, required_model
from spyglass.config.read import read_model_config
from spyglass.config.shipped import find_adapter, find_model
from spyglass.progress import Progress

HELP = "Write a checkpoint with an adapter merged into its weights, and say what the stored format loses of it."

_STORED = {"bf16": "matrices in bfloat16", "same": "each matrix in the format it had"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_model(parser, default=False)
    parser.add_argument("--lora", metavar="DIR", required=True, help="PEFT folder, or the name of a shipped adapter")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to create")
    parser.add_argument(
        "--format", choices=("bf16", "same"), default="bf16", help="bfloat16, or each matrix in the format it had"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="write even if nine tenths of the touched values of a group stay as they were",
    )


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, say what was merged."""
    model = find_model(required_model(args, "merge"))
    config = read_model_config(model)
    note_bases({"merged": args.lora}, model)
    from spyglass.lora.merge import merge_adapter  # after the cheap checks: these load torch
    from spyglass.lora.peft import read_adapter

    adapter = read_adapter(find_adapter(args.lora, model), config)
    with Progress(unit="B", unit_scale=True, desc="writing") as bar:
        report = merge_adapter(model, adapter, args.output, format=args.format, force=args.force, progress=bar.update)
    print(report)
    if len(report.groups) > 1:
        every = sum(loss.modules for loss in report.groups.values())
        print(f"in all: {_modules(every)} merged, {report.unchanged_share:.1%} of values unchanged")
    print(f"vision: {_modules(sum(report.groups[g].modules for g in ('tower', 'aligner') if g in report.groups))}")
    print(f"{args.output} written: {_STORED[args.format]}")
    return 0


def _modules(count: int) -> str:
    return f"{count} {'module' if count == 1 else 'modules'}"
