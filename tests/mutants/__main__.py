"""Plant each fault in a copy of the tree, run the tests that should notice, report who lived.

`python -m tests.mutants [FILTER] [--since REF]`: FILTER is a part of a file name or of a fault's description.
Without `--since`: the rows written by hand. With it: faults in the lines that changed since that commit.
Exit code 0 only if every fault was noticed by a failing test; a run that could not start counts as a fault of the row.
A run of `TIMES_LONGER` times what it takes without a fault is ended: the fault was noticed, and shows as `hung`.
Noticed is also what ends the process of the tests; it shows as `crashed`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from spyglass.ops.build import PLAIN, library_path
from tests.mutants.changed import changed_mutants
from tests.mutants.mutant import Mutant
from tests.mutants.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("spyglass", "tests", "docs", "benchmarks", "examples", "scripts")
COPIED_FILES = ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")
PASSED, FAILED = 0, 1  # pytest's exit codes; anything above means that it could not run the tests
HUNG = -1
CRASHED = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE, -signal.SIGILL}
SOUND_SECONDS = 600.0  # most that a selection may take without a fault
_VERDICTS = {PASSED: "SURVIVED", FAILED: "killed", HUNG: "hung"}
TIMES_LONGER, LEAST_SECONDS = 5, 60.0


def copy_tree(target: Path) -> None:
    """The parts of the repository that tests need."""
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for folder in COPIED:
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, target / folder, ignore=ignore)
    for file in COPIED_FILES:
        shutil.copy(ROOT / file, target / file)


def link_kernels(cache: Path) -> None:
    """CPU kernels that are built already, in a cache that goes when the run ends: faulty ones must not stay."""
    (cache / "spyglass").mkdir(parents=True)
    for library in library_path(PLAIN).parent.glob("*.so"):
        (cache / "spyglass" / library.name).symlink_to(library)


def environment_of(root: Path) -> dict[str, str]:
    """Where the tree at `root` is what `spyglass` and `tests` mean."""
    own = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(root.parent / "cache")}
    return {**os.environ, **own}


def build_kernels(root: Path) -> None:
    """Build the CPU kernels of the tree: what that takes must not count as a test that hangs."""
    command = [sys.executable, "-m", "spyglass.ops.build"]
    run = subprocess.run(command, cwd=root, env=environment_of(root), capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(run.stderr[-2000:])


def run_tests(root: Path, selection: str, seconds: float) -> tuple[int, str]:
    """Pytest's exit code (HUNG: no end in time) and the end of its output, for the tree at `root`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *shlex.split(selection)]
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment_of(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests started can be ended with them
    ) as run:
        try:
            output, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return HUNG, f"no end within {seconds:.0f} s"
    return run.returncode, output[-2000:]


def try_mutant(mutant: Mutant, trees: SimpleQueue[Path], seconds: float) -> str:
    """Run one mutant and print what became of it: killed, hung, crashed, SURVIVED or BROKEN."""
    root = trees.get()
    try:
        sound = (root / mutant.file).read_text(encoding="utf-8")
        (root / mutant.file).write_text(mutant.mutate(sound), encoding="utf-8")
        try:
            if mutant.file.endswith((".cpp", ".h")):
                build_kernels(root)
            code, output = run_tests(root, mutant.tests, seconds)
        finally:
            (root / mutant.file).write_text(sound, encoding="utf-8")
    except (ValueError, SyntaxError, OSError) as error:
        code, output = FAILED + 1, str(error)
    finally:
        trees.put(root)
    verdict = "crashed" if code in CRASHED else _VERDICTS.get(code, "BROKEN")
    by = [line.split()[1] for line in output.splitlines() if verdict == "killed" and line.startswith("FAILED ")]
    detail = output.strip() if verdict == "BROKEN" else " ".join(by)
    print(f"{verdict:<8}  {mutant.file}: {mutant.fault}\n          {detail}".rstrip(), flush=True)
    return verdict


def time_sound_selections(mutants: list[Mutant], root: Path) -> dict[str, float] | None:
    """Seconds of each selection without a fault; None if one does not pass, for then a failure would prove nothing."""
    seconds: dict[str, float] = {}
    for selection in sorted({mutant.tests for mutant in mutants}):
        began = time.monotonic()
        code, output = run_tests(root, selection, SOUND_SECONDS)
        if code != PASSED:
            print(f"without any fault, `pytest {selection}` does not pass:\n{output}")
            return None
        seconds[selection] = time.monotonic() - began
    return seconds


def main() -> int:
    """Run the mutants that match the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("filter", nargs="?", default="", help="part of a file name or of a fault's description")
    parser.add_argument("--jobs", type=int, default=2, help="trees worked on at the same time")
    parser.add_argument("--since", help="plant faults in lines that changed since this commit, not the rows")
    parser.add_argument("--limit", type=int, default=200, help="with --since: how many at most")
    args = parser.parse_args()
    rows = ROWS if args.since is None else changed_mutants(ROOT, args.since, args.limit)
    mutants = [mutant for mutant in rows if args.filter in mutant.file or args.filter in mutant.fault]
    if not mutants:
        print(f"no mutant matches {args.filter!r}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        link_kernels(Path(folder) / "cache")
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(args.jobs):
            copy_tree(Path(folder) / str(job))
            trees.put(Path(folder) / str(job))
        seconds = time_sound_selections(mutants, Path(folder) / "0")
        if seconds is None:
            return 2
        limits = [max(LEAST_SECONDS, TIMES_LONGER * seconds[mutant.tests]) for mutant in mutants]
        with ThreadPoolExecutor(args.jobs) as pool:
            verdicts = list(pool.map(lambda mutant, limit: try_mutant(mutant, trees, limit), mutants, limits))
    noticed = sum(verdict in ("killed", "hung", "crashed") for verdict in verdicts)
    print(f"{noticed} of {len(verdicts)} mutants noticed, {verdicts.count('hung')} of them by their time only")
    return 0 if noticed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
