"""Mutants of the lines that changed since a commit, and the tests that should notice them."""

from __future__ import annotations

import ast
import random
import re
import subprocess
from functools import cache
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.mutants.syntax import edits

_HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_NOT_SLOW = "-m 'not slow and not gpu'"


def changed_lines(root: Path, since: str) -> dict[str, set[int]]:
    """Numbers of the lines of the package's Python files that `git diff since` adds or changes."""
    command = ["git", "diff", "--unified=0", "--no-renames", "--diff-filter=AM", since, "--", "spyglass/*.py"]
    diff = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    found: dict[str, set[int]] = {}
    for part in re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]:
        file = re.search(r"^\+\+\+ b/(.+)$", part, re.MULTILINE)
        if file:
            hunks = [(int(first), int(count or 1)) for first, count in _HUNK.findall(part)]
            found[file[1]] = {line for first, count in hunks for line in range(first, first + count)}
    return found


@cache
def _imports(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    named = {f"{node.module}.{alias.name}" for node in froms for alias in node.names} | {node.module for node in froms}
    return frozenset(
        named | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    )


def tests_of(root: Path, file: str) -> str:
    """Pytest arguments of the tests that import the module; of those of its room if none does."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    tests = sorted(path for path in (root / "tests").rglob("test_*.py") if module in _imports(path))
    chosen = [str(path.relative_to(root)) for path in tests if path.parts[-2] not in ("gpu", "rules")]
    room = Path(file).parts[1].removesuffix(".py")
    folders = [folder for folder in (f"tests/unit/{room}", f"tests/{room}", "tests/laws") if (root / folder).is_dir()]
    return " ".join([*(chosen or folders[:1]), _NOT_SLOW])


def changed_mutants(root: Path, since: str, limit: int, seed: int = 0) -> list[Mutant]:
    """At most `limit` mutants of the changed lines, drawn evenly with `seed`."""
    found = []
    for file, lines in sorted(changed_lines(root, since).items()):
        source = (root / file).read_text(encoding="utf-8")
        tests = tests_of(root, file)
        for edit in edits(source, lines):
            fault = f"line {edit.line}: {edit.fault}"
            found.append(Mutant(file, source, edit.apply(source), tests, fault))
    chosen = sorted(random.Random(seed).sample(range(len(found)), min(limit, len(found))))
    return [found[index] for index in chosen]
