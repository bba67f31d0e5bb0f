"""What benchmarks share: options, and what a number was measured on (commit, hardware, versions), which each prints."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spyglass.config.fields import integer

RESULTS = Path("benchmarks/results")
_PACKAGES = ("torch", "numpy", "pillow", "tokenizers", "safetensors")


def positive(text: str) -> int:
    """An option's value that counts something of which there must be one at least."""
    try:
        value = integer(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Where checkpoints are written that a benchmark makes."""
    what = "where the checkpoints are stored (default build/bench)"
    parser.add_argument("--folder", type=Path, default=Path("build/bench"), help=what)


def announce(threads: int | None = None, **more: str) -> dict[str, str]:
    """Print and return `describe_machine` and `more`; with `threads` the CPU ops have so many from here on."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
        more["threads"] = str(threads)
    machine = describe_machine() | more
    print("  ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    return machine


def describe_machine() -> dict[str, str]:
    """Commit (with `+` when files differ from it), processor, usable cores, load, Python and package versions."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def save_numbers(name: str, machine: Mapping[str, str], numbers: Mapping[str, Any], path: Path | None = None) -> None:
    """Write `numbers` with the machine as JSON: to `path`, or below RESULTS by benchmark and commit."""
    path = path or RESULTS / f"{name}-{machine['commit'].rstrip('+')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **numbers}, indent=2) + "\n", encoding="utf-8")
    print(f"saved to {path}")


def _commit() -> str:
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
