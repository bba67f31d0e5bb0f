"""Plant each fault in a copy of the tree, run the tests that should notice, report who lived.

`python -m tests.mutants [FILTER] [--jobs N]`: FILTER is a part of a file name or of a fault's description.
Exit code 0 only if every fault was noticed by a failing test; a run that could not start counts as a fault of the row.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutant import Mutant
from tests.mutants.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("spyglass", "tests", "docs", "benchmarks", "examples")
COPIED_FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")
PASSED, FAILED = 0, 1  # pytest's exit codes; anything above means that it could not run the tests
SECONDS = 600


def copy_tree(target: Path) -> None:
    """The parts of the repository that tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for folder in COPIED:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
    for file in COPIED_FILES:
        shutil.copy(ROOT / file, target / file)


def run_tests(root: Path, selection: str) -> tuple[int, str]:
    """Pytest's exit code and the end of its output, for the tree at `root`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(selection)]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {SECONDS} s"  # a fault that hangs is a fault that shows
    return done.returncode, (done.stdout + done.stderr)[-2000:]


def try_mutant(mutant: Mutant, trees: SimpleQueue[Path]) -> tuple[str, str]:
    """(verdict, detail): killed, SURVIVED or BROKEN."""
    root = trees.get()
    try:
        sound = mutant.plant(root)
        code, output = run_tests(root, mutant.tests)
        (root / mutant.file).write_text(sound, encoding="utf-8")
    except (ValueError, SyntaxError, OSError) as error:
        return "BROKEN", str(error)
    finally:
        trees.put(root)
    if code == FAILED:
        return "killed", ""
    return ("SURVIVED", "") if code == PASSED else ("BROKEN", output)


def sound_selections_pass(mutants: list[Mutant], root: Path) -> bool:
    """Without a fault every selection must pass, or a failure would prove nothing."""
    for selection in sorted({mutant.tests for mutant in mutants}):
        code, output = run_tests(root, selection)
        if code != PASSED:
            print(f"without any fault, `pytest {selection}` does not pass:\n{output}")
            return False
    return True


def report(mutants: list[Mutant], verdicts: list[tuple[str, str]]) -> int:
    """Print one line per mutant; the number of those that were not killed."""
    for mutant, (verdict, detail) in zip(mutants, verdicts, strict=True):
        print(f"{verdict:<8}  {mutant.file}: {mutant.fault}")
        if detail:
            print(f"          {detail.strip()}")
    alive = sum(verdict != "killed" for verdict, _ in verdicts)
    print(f"{len(mutants) - alive} of {len(mutants)} mutants killed")
    return alive


def main() -> int:
    """Run the mutants that match the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("filter", nargs="?", default="", help="part of a file name or of a fault's description")
    parser.add_argument("--jobs", type=int, default=2, help="trees worked on at the same time")
    args = parser.parse_args()
    mutants = [mutant for mutant in ROWS if args.filter in mutant.file or args.filter in mutant.fault]
    if not mutants:
        print(f"no mutant matches {args.filter!r}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            copy_tree(Path(folder) / str(job))
            trees.put(Path(folder) / str(job))
        if not sound_selections_pass(mutants, Path(folder) / "0"):
            return 2
        with ThreadPoolExecutor(args.jobs) as pool:
            verdicts = list(pool.map(lambda mutant: try_mutant(mutant, trees), mutants))
    return 1 if report(mutants, verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
