"""Building the CPU kernels: never in silence, whole or not at all, and what a killed build left does not stay.

The compiler here is a script that waits while a file says so, and then writes what it was asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spyglass.errors import DeviceError
from spyglass.ops import build

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels are built on Linux only")
SLOW_COMPILER = """#!/bin/sh
while [ -e "{hold}" ]; do sleep 0.02; done
while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done
exit 0
"""
PROGRAM = """
import sys
from spyglass.ops import build
build.find_compiler = lambda: sys.argv[1]
build.build(build.PLAIN)
"""


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.02)


class Desk:
    """A cache folder, and compilers that wait while their file `hold` is there."""

    def __init__(self, root: Path) -> None:
        self.root, self.cache = root, root / "spyglass"

    def compiler(self, name: str, *, waits: bool = False) -> Path:
        hold, script = self.root / f"{name}.hold", self.root / name
        if waits:
            hold.touch()
        script.write_text(SLOW_COMPILER.format(hold=hold))
        script.chmod(0o755)
        return script

    def release(self, name: str) -> None:
        (self.root / f"{name}.hold").unlink()

    def release_when(self, name: str, true: Callable[[], object]) -> None:
        """Let the compiler go when something is true; in the end also if it never is."""
        with contextlib.suppress(AssertionError):
            until(true, 20.0)
        self.release(name)

    def start(self, compiler: Path) -> subprocess.Popen[bytes]:
        """Another process that builds with this compiler, and has begun."""
        before = len(self.unfinished())
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.root)}
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(compiler)], env=environment)
        until(lambda: len(self.unfinished()) > before)
        return process

    def unfinished(self) -> list[str]:
        return sorted(path.name for path in self.cache.glob("*") if path.is_dir())

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("*.so"))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Desk(tmp_path)
    yield made
    for hold in tmp_path.glob("*.hold"):  # lets scripts go whose parent was killed
        hold.unlink()


def build_with(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "find_compiler", lambda: str(compiler))
    return build.build(build.PLAIN)


@pytest.mark.parametrize("next_one", ["same", "other"])
def test_what_a_killed_build_left_goes_with_the_next_build(
    next_one: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that is of the same library or, after an update, of another."""
    killed = desk.start(desk.compiler("same", waits=True))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(desk.unfinished()) == 1 and not desk.libraries()
    desk.release("same")
    library = build_with(desk.root / "same" if next_one == "same" else desk.compiler("other"), monkeypatch)
    assert desk.unfinished() == [] and desk.libraries() == [library]


def test_a_build_under_way_keeps_its_folder_while_another_library_is_built(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = desk.start(desk.compiler("slow", waits=True))
    folders = desk.unfinished()
    other = build_with(desk.compiler("fast"), monkeypatch)
    assert desk.unfinished() == folders and len(folders) == 1 and desk.libraries() == [other]
    desk.release("slow")
    assert under_way.wait(60) == 0 and len(desk.libraries()) == 2 and desk.unfinished() == []


def test_who_wants_a_library_that_another_process_builds_waits_for_it_and_says_so(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "WORD_EVERY", 0.01)
    under_way = desk.start(desk.compiler("slow", waits=True))
    folders, compiled = desk.unfinished(), list[str]()
    monkeypatch.setattr(build, "compile_library", lambda isa, path: compiled.append(isa))

    words = "another process builds the CPU kernels; waited for it for"
    helper = threading.Thread(target=desk.release_when, args=("slow", lambda: words in caplog.text))
    helper.start()
    library = build_with(desk.root / "slow", monkeypatch)
    helper.join()
    assert words in caplog.text and len(folders) == 1
    assert library.read_text() == "built\n" and not compiled and under_way.wait(60) == 0


def test_a_build_says_how_far_it_is(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(build, "WORD_EVERY", 0.01)
    total = len(list(build.SOURCES.glob("*.cpp")))

    words = f"building the CPU kernels: 0 of {total} files after 0 s"
    helper = threading.Thread(target=desk.release_when, args=("slow", lambda: words in caplog.text))
    helper.start()
    build_with(desk.compiler("slow", waits=True), monkeypatch)
    helper.join()
    assert words in caplog.text and "once, about half a minute" in caplog.text


def test_a_build_that_failed_is_tried_again_when_its_note_is_removed_which_the_reason_says(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may have been for want of memory."""
    compiler = desk.compiler("compiler")
    sound, stamp = compiler.read_text(), compiler.stat().st_mtime_ns
    compiler.write_text("#!/bin/sh\nkill -9 $$\n")
    os.utime(compiler, ns=(stamp, stamp))
    with pytest.raises(DeviceError, match="did not compile"):
        build_with(compiler, monkeypatch)
    monkeypatch.setattr(build, "isas", lambda: (build.PLAIN,))
    reason = build.why_not()
    assert reason is not None and desk.unfinished() == []
    compiler.write_text(sound)
    os.utime(compiler, ns=(stamp, stamp))
    assert not build.prepare()
    Path(reason.rpartition("remove ")[2]).unlink()
    assert build.why_not() is None and build.prepare() and len(desk.libraries()) == 1
