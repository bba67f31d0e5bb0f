"""`spyglass new-checkpoint DIR --preset NAME`: a seeded random checkpoint in the official layout."""

from __future__ import annotations

import argparse

from spyglass.config.fields import integer
from spyglass.config.presets import PRESETS
from spyglass.progress import Progress

HELP = "Write a seeded random checkpoint in the official file layout, tokenizer included."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", help="folder to create")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="size of the model (default: tiny)")
    parser.add_argument(
        "--seed", type=integer, default=0, help="every tensor depends on this and its name alone (default: 0)"
    )
    parser.add_argument(
        "--format",
        choices=("packed", "bf16"),
        default="packed",
        help="FP8/FP4 as released, or bfloat16 (default: packed)",
    )
    parser.add_argument(
        "--names",
        choices=("native", "hf"),
        default="native",
        help="tensor names: official, or those of Transformers (default: native)",
    )
    parser.add_argument(
        "--headers-only", action="store_true", help="exact headers, no values: sparse files for planning"
    )


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint, say what was written."""
    from spyglass.checkpoint.random import new_checkpoint

    with Progress(unit="B", unit_scale=True, desc="writing") as bar:
        layout = new_checkpoint(
            args.directory,
            args.preset,
            seed=args.seed,
            format=args.format,
            names=args.names,
            headers_only=args.headers_only,
            progress=bar.update,
        )
    tensors = sum(len(shard.starts) for shard in layout.shards)
    kind = "headers (values are holes)" if args.headers_only else f"random weights, seed {args.seed}"
    print(
        f"{args.directory}: preset {args.preset}, {tensors:,} tensors, {layout.nbytes:,} bytes in {len(layout.shards)} "
        f"files, {args.format}, {args.names} names, {kind}"
    )
    return 0
