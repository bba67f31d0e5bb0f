"""`spyglass bench NAME ...`: hands the rest of the line to one benchmark of the `bench` room."""

from __future__ import annotations

import argparse
from importlib import import_module

HELP = "Measure one thing and print it beside its baseline: image, load, model, ops, engram or vision."
BENCHMARKS = ("image", "load", "model", "ops", "engram", "vision")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: the benchmark's name, then whatever that benchmark takes."""
    parser.add_argument("name", choices=BENCHMARKS, help="which benchmark")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of that benchmark")


def run(args: argparse.Namespace) -> int:
    """Run `spyglass.bench.<name>.run(argv)`; its result is the exit code."""
    benchmark = import_module(f"spyglass.bench.{args.name}")
    code: int = benchmark.run(args.rest)
    return code
