"""House rules that a formatter does not check; CONTRIBUTING.md says them in words."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spyglass"
MOST_LINES = 400
MOST_KERNEL_LINES = 600
VAGUE_NAMES = {"utils", "util", "common", "helper", "helpers", "manager", "base", "misc", "core"}
READS_ENVIRONMENT = {
    "config/engine.py",
    "config/options.py",
    "ops/build.py",
    "cli/main.py",
}  # of the last two one asks where a user's caches go, the other tells OpenMP how long threads spin
# The tokenizers library raises plain Exception and nothing narrower, whatever is wrong with its file.
# Besides: the one handler of the server (and of a stream that has begun), and the frames of the engine's thread.
CATCHES_WHOLESALE = {
    "engine/rank.py",  # whatever ends a rank is told to rank 0
    "engine/ranks.py",  # whatever breaks a step of one rank ends the others
    "prompt/tokenizer.py",
    "prompt/try_tokenizer.py",  # the library raises bare Exception
    "engram/vocabulary.py",
    "numbers.py",  # kernels that are compared may break with anything
    "server/middleware.py",
    "server/stream.py",
    "server/reading.py",  # the frame of one request, in a process that reads them
    "engine/worker.py",
    "engine/shares.py",  # whatever work ends with is told to who waits for it
    "engine/loop.py",  # the frame of one answer: its fault must not end the others of its step
    "server/batch.py",  # the loop that drives the engine when no thread does
    "server/readiness.py",  # the frame of a trial: what breaks in a task without readers must be told
    "bench/tune.py",  # a launch that cannot run is a result
    "engine/rehearsal.py",  # what is done ahead would be done later as well
    "ops/launches.py",  # one kernel among many; whatever a compiler raises comes again at its launch
}
PRINTS = {"cli", "bench", "progress.py"}  # rooms that talk to a terminal
RUN_BY_NAME = {"ops/build.py"}  # `python -m` modules outside those rooms
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:home|root|tmp|work|mnt)/\w")
UNANCHORED_TODO = re.compile(r"(?:#|//)\s*(?:TODO|FIXME|XXX)\b(?!\(#?\w)")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cpp", ".h", ".sh", ".html", ".js", ""}


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def tracked_files() -> list[Path]:
    """Files that git knows; every text file where there is no git."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = done.stdout.decode().split("\0") if done.returncode == 0 else []
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in package_files()}


def test_options_read_numbers_by_our_own_rule(trees: dict[Path, ast.Module]) -> None:
    """`int` and `float` read more than a person means."""
    loose = [
        f"{name(path)}:{call.lineno}"
        for path, tree in trees.items()
        for function, call in calls(tree)
        if function.endswith("add_argument")
        for word in call.keywords
        if word.arg == "type" and {"int", "float"} & {ast.unparse(node) for node in ast.walk(word.value)}
    ]
    assert not loose


def test_files_are_short_enough_to_hold_in_the_head() -> None:
    tests = [
        path for path in (ROOT / "tests").rglob("*.py") if not path.name.endswith("_rows.py")
    ]  # tables may be long
    sources = [*package_files(), *PACKAGE.rglob("*.cpp"), *PACKAGE.rglob("*.h"), *tests]
    long = {}
    for path in sources:
        kernel = path.stem.startswith("triton") or path.suffix in (".cpp", ".h")
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > (MOST_KERNEL_LINES if kernel else MOST_LINES):
            long[str(path.relative_to(ROOT))] = lines
    assert not long


def test_no_module_has_a_name_that_could_hold_anything() -> None:
    vague = [name(path) for path in package_files() if VAGUE_NAMES & set(Path(name(path)).with_suffix("").parts)]
    assert not vague


def test_errors_are_never_caught_wholesale(trees: dict[Path, ast.Module]) -> None:
    wholesale = [
        f"{name(path)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and name(path) not in CATCHES_WHOLESALE
        and (node.type is None or {"Exception", "BaseException"} & set(re.findall(r"\w+", ast.unparse(node.type))))
    ]
    assert not wholesale


def test_the_environment_is_read_in_one_file(trees: dict[Path, ast.Module]) -> None:
    readers = {
        name(path)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    }
    assert readers <= READS_ENVIRONMENT


def test_only_rooms_that_face_a_terminal_print(trees: dict[Path, ast.Module]) -> None:
    printing = {
        name(path)
        for path, tree in trees.items()
        if path.relative_to(PACKAGE).parts[0] not in PRINTS and any(called == "print" for called, _ in calls(tree))
    }
    assert not printing - RUN_BY_NAME


def test_nothing_is_read_with_a_silent_default(trees: dict[Path, ast.Module]) -> None:
    guesses = [
        f"{name(path)}:{call.lineno}"
        for path, tree in trees.items()
        for called, call in calls(tree)
        if called == "getattr" and len(call.args) == 3
    ]
    assert not guesses


def test_no_module_keeps_state(trees: dict[Path, ast.Module]) -> None:
    stateful = [
        f"{name(path)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    assert not stateful


def test_every_module_and_public_name_says_what_it_is(trees: dict[Path, ast.Module]) -> None:
    silent = []
    for path, tree in trees.items():
        named = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        silent += [f"{name(path)}:{n.lineno} {n.name}" for n in named if n.name[0] != "_" and not ast.get_docstring(n)]
        if tree.body and not ast.get_docstring(tree):
            silent.append(name(path))
    assert not silent


@pytest.mark.parametrize("pattern", [MACHINE_PATH, UNANCHORED_TODO], ids=["machine path", "unanchored to-do"])
def test_no_text_file_holds(pattern: re.Pattern[str]) -> None:
    found = []
    for path in tracked_files():
        if path.suffix in TEXT_SUFFIXES and path.resolve() != Path(__file__).resolve():
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names with an underscore that a test takes from something else than itself, patches by name included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spyglass"):
            yield from (alias.name for alias in node.names if re.match(r"_[a-zA-Z]", alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
            texts = [word.value for word in node.args[:2] if isinstance(word, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and re.search(r"(^|\.)_[a-zA-Z]\w*$", text))


def test_tests_use_what_is_public() -> None:
    """Private names may change without a test noticing; what tests must see or steer gets a public one."""
    of_others = {"parser._actions", "shutil._ntuple_diskusage"}  # of Python's library
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("test_*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
        if name not in of_others and not name.endswith(")._actions")
    ]
    assert not found
