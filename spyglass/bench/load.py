"""Loading a checkpoint against `cat` of the same files: GB/s, and how far memory rises above the model.

Reading needs memory, so there are three baselines: `cat` to nowhere, `cat` into memory (a file in /dev/shm),
and a plain copy of as many bytes between two tensors. "cold" drops the files from the page cache first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from spyglass.bench.machine import describe_machine, positive
from spyglass.checkpoint.random import new_checkpoint
from spyglass.checkpoint.safetensors import Checkpoint, open_checkpoint
from spyglass.model import load_model


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement; `seconds` is the median of the runs."""

    name: str
    seconds: float
    gb_per_second: float


def run(argv: Sequence[str]) -> int:
    """Print the table (or JSON); a folder to load may be given, else a `mini` checkpoint is written first."""
    parser = argparse.ArgumentParser(prog="spyglass bench load", description=__doc__)
    parser.add_argument("directory", nargs="?", help="checkpoint folder; default: a random `mini` checkpoint")
    parser.add_argument("--runs", type=positive, default=5, help="runs of each measurement, the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(args.directory) if args.directory else Path(scratch) / "mini"
        if not args.directory:
            new_checkpoint(directory, "mini")
        result = measure(directory, args.runs)
    print(json.dumps(result, indent=2) if args.json else _as_text(result))
    return 0


def measure(directory: Path, runs: int) -> dict[str, object]:
    """All baselines and ours, taking turns so that a change of the machine's mood meets all of them."""
    checkpoint = open_checkpoint(directory)
    nbytes = sum(file.stat().st_size for file in checkpoint.files)
    cases: dict[str, Callable[[], float]] = {
        "cold cat to nowhere": lambda: _cat(checkpoint, "/dev/null", cold=True),
        "cold load": lambda: _load(checkpoint, cold=True),
        "warm cat to nowhere": lambda: _cat(checkpoint, "/dev/null", cold=False),
        "warm cat into memory": lambda: _cat(checkpoint, f"/dev/shm/spyglass-bench-{os.getpid()}", cold=False),
        "warm copy between tensors": lambda: _copy(nbytes),
        "warm load": lambda: _load(checkpoint, cold=False),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, case in cases.items():
            times[name].append(case())
    medians = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    speeds = [Speed(name, seconds, nbytes / 1e9 / seconds) for name, seconds in medians.items()]
    return {
        "machine": describe_machine(),
        "directory": str(directory),
        "bytes": nbytes,
        "speeds": [asdict(speed) for speed in speeds],
        "load_over_cat_cold": medians["cold cat to nowhere"] / medians["cold load"],
        "load_over_cat_into_memory_warm": medians["warm cat into memory"] / medians["warm load"],
        "peak_bytes_above_model": peak_above_model(directory),
    }


def peak_above_model(directory: Path) -> int:
    """How far a fresh process's peak memory rises above its start and the model's bytes while it loads."""
    program = "import sys, pathlib, spyglass.bench.load as load; load.report_peak(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", program, str(directory)], check=True, capture_output=True, text=True)
    return int(done.stdout)


def report_peak(directory: Path) -> None:
    """Load once and print the peak above start and model; meant for a process of its own."""
    before = resident("VmRSS")
    loaded = load_model(directory, progress=False)
    print(resident("VmHWM") - before - loaded.report.nbytes)


def resident(field: str) -> int:
    """Bytes of this process: VmRSS = resident now, VmHWM = the most so far (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _load(checkpoint: Checkpoint, *, cold: bool) -> float:
    if cold:
        _drop(checkpoint)
    return load_model(checkpoint.directory, progress=False).report.seconds


def _cat(checkpoint: Checkpoint, target: str, *, cold: bool) -> float:
    if cold:
        _drop(checkpoint)
    started = time.perf_counter()
    with open(target, "wb") as sink:
        subprocess.run(["cat", *checkpoint.files], stdout=sink, check=True)
    seconds = time.perf_counter() - started
    if target != "/dev/null":
        os.unlink(target)
    return seconds


def _copy(nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8)
    started = time.perf_counter()
    torch.empty(nbytes, dtype=torch.uint8).copy_(source)
    return time.perf_counter() - started


def _drop(checkpoint: Checkpoint) -> None:
    """Forget the files' pages, so that the next read comes from the disk."""
    for file in checkpoint.files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _as_text(result: dict[str, object]) -> str:
    machine, speeds = result["machine"], result["speeds"]
    assert isinstance(speeds, list) and isinstance(machine, dict)
    lines = [", ".join(f"{name} {value}" for name, value in machine.items())]
    lines += [f"{result['directory']}: {int(str(result['bytes'])) / 1e9:.2f} GB"]
    lines += [
        f"  {speed['name']:<26} {speed['seconds']:>8.3f} s {speed['gb_per_second']:>7.2f} GB/s" for speed in speeds
    ]
    lines.append(f"load at {float(str(result['load_over_cat_cold'])):.0%} of cat's speed from disk")
    lines.append(
        f"load at {float(str(result['load_over_cat_into_memory_warm'])):.0%} of cat's speed into memory, cached"
    )
    lines.append(f"peak memory above the model: {int(str(result['peak_bytes_above_model'])) / 1e6:.0f} MB")
    return "\n".join(lines)
