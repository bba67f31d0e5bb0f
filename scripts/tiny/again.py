"""Teach the shipped models what is new in the tiny world, from the weights they have: both models, then their adapters.

`python -m scripts.tiny.again --folder runs/again --seconds 1750` on one GPU does all of it; what comes out lies in
`FOLDER/models`, laid out as `spyglass/models`. Where a command may not take so long, the parts run one by one with
--only v4, --only v41 and --only adapters: each takes its share of the same seconds, and a model that was stopped goes
on from its last state. `python -m scripts.tiny.judge FOLDER/models` on a CPU then says whether they may be shipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.tiny.adapters import RECIPES
from scripts.tiny.bins import BINS
from scripts.tiny.models import FAMILIES, NAMES, Family
from scripts.tiny.train import FILES
from spyglass.config.shipped import SHIPPED

PARTS = (*FAMILIES, "adapters")
SHARES = {"v4": 0.285, "v41": 0.285, "adapters": 0.33}  # the rest is for what begins and ends around them
RATE = 1.5e-3  # less than half of a first training's: most is known already
MOST_BYTES = 12_500_000  # of a model's folder without its adapters


def model_command(family: Family, args: argparse.Namespace) -> list[str]:
    """What trains one model for its share of the time."""
    minutes = SHARES[family] * args.seconds / 60
    options = {
        "folder": args.folder / family,
        "start": args.start / NAMES[family],
        "minutes": f"{minutes:.3f}",
        "rate": args.rate,
        "device": args.device,
        "workers": args.workers,
        "bins": args.bins,
        "seed": args.seed,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    flags += ["--no-compile"] * args.no_compile + ["--keep-tower"] * args.keep_tower
    return [sys.executable, "-m", "scripts.tiny.train", family, *flags]


def adapter_command(key: str, args: argparse.Namespace) -> list[str]:
    """What trains one adapter, from the shipped one, for its share of the time."""
    minutes = RECIPES[key].minutes / sum(recipe.minutes for recipe in RECIPES.values())
    options = {
        "models": args.folder / "models",
        "output": args.folder / "adapters",
        "start": args.start,
        "only": key,
        "minutes": f"{SHARES['adapters'] * args.seconds / 60 * minutes:.3f}",
        "device": args.device,
        "workers": args.workers,
        "seed": args.seed,
    }
    return [sys.executable, "-m", "scripts.tiny.adapters", *(f"--{name}={value}" for name, value in options.items())]


def collect(family: Family, folder: Path) -> int:
    """Copy a trained model to where it is shipped from; the bytes of its files."""
    trained, place = folder / family / NAMES[family], folder / "models" / NAMES[family]
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.safetensors*"):
        old.unlink()
    for path in [*(trained / name for name in FILES), *trained.glob("*.safetensors*")]:
        shutil.copy(path, place / path.name)
    return sum(path.stat().st_size for path in place.iterdir() if path.is_file())


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="states, logs and the models that come out")
    parser.add_argument("--seconds", type=float, default=1750.0, help="for all parts together")
    parser.add_argument(
        "--only", choices=(*PARTS, *RECIPES), action="append", help="a part, or one adapter; may be repeated"
    )
    parser.add_argument("--start", type=Path, default=SHIPPED, help="where the models to begin with lie")
    parser.add_argument("--rate", type=float, default=RATE, help="the highest learning rate of the models")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--bins", type=int, default=BINS, help="size of a step; 1 for a trial on a CPU")
    parser.add_argument("--keep-tower", action="store_true", help="do not train what sees: for a trial on a CPU")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=7, help="other than that of the first training")
    args = parser.parse_args(arguments)
    begun = time.perf_counter()
    for part in args.only or PARTS:
        if part in FAMILIES:
            _run(model_command(part, args), begun)
            size = collect(part, args.folder)
            print(f"again {time.perf_counter() - begun:.0f} s: {NAMES[part]} has {size:,} bytes", flush=True)
            if size > MOST_BYTES:
                raise SystemExit(f"{NAMES[part]} is larger than {MOST_BYTES:,} bytes")
            continue
        for key in RECIPES if part == "adapters" else [part]:
            _run(adapter_command(key, args), begun)
            place = RECIPES[key].place
            shutil.copytree(args.folder / "adapters" / place, args.folder / "models" / place, dirs_exist_ok=True)


def _run(command: Sequence[str], begun: float) -> None:
    print(f"again {time.perf_counter() - begun:.0f} s: {' '.join(command[2:])}", flush=True)
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(f"this ended with {code}; run it again, it goes on from its last state")


if __name__ == "__main__":
    main()
