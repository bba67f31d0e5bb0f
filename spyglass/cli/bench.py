"""`spyglass bench NAME ...`: hands the rest of the line to one benchmark of the `bench` room."""

from __future__ import annotations

import argparse
from importlib import import_module

HELP = "Measure one part and print it beside its baseline."
BENCHMARKS = {
    "image": "images to patches, beside a plain pipeline",
    "load": "files to memory, beside cat",
    "model": "decode and prefill, beside what the memory allows",
    "engine": "many requests at once, beside what the machine allows",
    "cache": "the first token of a prompt that was there before, beside a new one",
    "serve": "a server under load, beside the engine alone",
    "stream": "the server's own work for each streamed token, beside fixed events",
    "reading": "requests read in a process of their own, beside the same in this one",
    "ops": "each op, beside its reference",
    "engram": "rows of V4.1's tables, beside a prefill",
    "vision": "the image tower on a GPU",
    "gpu": "decode and prefill of the text path on a GPU, beside what memory and arithmetic allow",
    "tune": "launches of the Triton kernels on a GPU, beside those in use; writes the table that launch code reads",
    "train": "fine-tuning at real layer sizes, beside one large product",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: the benchmark's name, then whatever that benchmark takes."""
    parser.usage = f"spyglass bench {{{','.join(BENCHMARKS)}}} [options]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, BENCHMARKS))
    names = "\n".join(f"  {name:<{width}}  {text}" for name, text in BENCHMARKS.items())
    parser.epilog = f"benchmarks:\n{names}\n\n`spyglass bench NAME --help` lists the options of one."
    parser.add_argument("name", metavar="NAME", choices=tuple(BENCHMARKS), help="which benchmark")
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False  # argparse would name it among what is missing


def run(args: argparse.Namespace) -> int:
    """Run `spyglass.bench.<name>.run(argv)`; its result is the exit code."""
    benchmark = import_module(f"spyglass.bench.{args.name}")
    code: int = benchmark.run(args.rest)
    return code
