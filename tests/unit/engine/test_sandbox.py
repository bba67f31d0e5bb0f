"""Grammars that nobody can wait for: tried in a process that can be ended, which is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spyglass.engine.structured import compile as program
from spyglass.engine.structured import sandbox
from spyglass.engine.structured.compile import Words, compile_grammar, run_deep
from spyglass.engine.structured.sandbox import GrammarSandbox
from spyglass.errors import OverloadedError, PromptError, SpyglassError

WORDS = Words([bytes((byte,)) for byte in range(256)] + [b"ab", b""], [257], [257])
SLOW: list[tuple[str, Any]] = [
    ("regex", "a?" * 65_000),
    ("grammar", "start: A\nA: " + " & ".join(f"/(.{{{count}}})*/" for count in range(2, 20))),
    ("json_schema", {"allOf": [{"type": "string", "pattern": f"a.*b{{{n}}}", "minLength": n} for n in range(30)]}),
]


@pytest.fixture
def trials() -> Iterator[GrammarSandbox]:
    made = GrammarSandbox(WORDS, cpu_seconds=1.0, wall_seconds=600)
    yield made
    for process in made.waiting:
        process.end()


def seconds(trials: GrammarSandbox, kind: str, value: Any) -> float:
    return trials.seconds(kind, json.dumps([kind, value]))


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Processes that were started in this test and have not ended."""
    started: list[subprocess.Popen[str]] = []

    class Told(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Told)
    return lambda: {process.pid for process in started if process.poll() is None}


@pytest.mark.parametrize(("kind", "value"), SLOW, ids=["pattern", "grammar", "allOf"])
def test_a_form_that_takes_too_long_is_refused_and_nothing_stays_busy(
    trials: GrammarSandbox, running: Callable[[], set[int]], kind: str, value: Any
) -> None:
    with pytest.raises(PromptError, match=f"the {kind} asked for takes more than 1 s to compile.*make it smaller"):
        seconds(trials, kind, value)
    assert not running()
    seconds(trials, "regex", "ab*")  # the next one is tried as ever


def test_what_overflows_ends_the_trial_and_not_us(trials: GrammarSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds(trials, "regex", "a")
    (process,) = trials.waiting
    monkeypatch.setattr(process, "exchange", lambda line: process.process.send_signal(signal.SIGSEGV) or "")
    with pytest.raises(PromptError, match="the regex asked for takes more stack or memory than one grammar may have"):
        seconds(trials, "regex", "b")
    seconds(trials, "regex", "b")


def test_a_process_that_was_ended_while_it_waited_is_no_fault_of_a_form(trials: GrammarSandbox) -> None:
    seconds(trials, "regex", "a")
    (process,) = trials.waiting
    process.process.kill()
    process.process.wait()
    seconds(trials, "regex", "b")


def test_a_machine_that_is_too_busy_is_no_fault_of_a_form(running: Callable[[], set[int]]) -> None:
    with pytest.raises(OverloadedError, match=r"could not be compiled in 0\.1 s.*send it again later") as caught:
        seconds(GrammarSandbox(WORDS, cpu_seconds=60, wall_seconds=0.1), *SLOW[0])
    assert caught.value.retry_after_s == 0.1 and not running()


@pytest.mark.slow
def test_time_counts_only_while_a_form_is_tried(running: Callable[[], set[int]]) -> None:
    trials = GrammarSandbox(WORDS, cpu_seconds=60, wall_seconds=4)
    seconds(trials, "regex", "a")
    time.sleep(4.2)
    assert len(running()) == 1
    (process,) = trials.waiting
    process.end()


def test_processes_are_kept_for_the_next_forms_and_not_without_bound(
    trials: GrammarSandbox, running: Callable[[], set[int]]
) -> None:
    threads = [threading.Thread(target=seconds, args=(trials, "regex", f"a{number}")) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = running()
    assert 1 <= len(kept) <= 2
    seconds(trials, "regex", "b")
    assert running() == kept, "the same ones"


def test_a_trial_gives_way_to_the_steps_of_an_engine_and_hears_no_ctrl_c(trials: GrammarSandbox) -> None:
    """Where sessions share the processors between them, it must be in ours, or its niceness means nothing."""
    seconds(trials, "regex", "a")
    (process,) = trials.waiting
    pid = process.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)
    assert os.getsid(pid) == os.getsid(0) and os.getpgid(pid) == pid


def test_without_a_process_there_is_a_clear_error(trials: GrammarSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "executable", "/no/such/python")
    with pytest.raises(SpyglassError, match="cannot be started"):
        seconds(trials, "regex", "a")
    monkeypatch.setattr(sandbox.sys, "executable", "/bin/false")
    with pytest.raises(SpyglassError, match="ended at once, with 1"):
        seconds(trials, "regex", "a")


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", "(a"), ("grammar", "start: b"), ("json_schema", {"type": "x"}), ("regex", "a[bc]{3}")]
)
def test_a_trial_says_what_compiling_here_says(trials: GrammarSandbox, kind: str, value: Any) -> None:
    def told(work: Any) -> str:
        try:
            work()
        except (ValueError, PromptError) as error:
            return str(error)
        return ""

    vocabulary = WORDS.vocabulary()
    here = told(lambda: run_deep(lambda: compile_grammar(kind, value, vocabulary), threading.Lock()))
    assert told(lambda: seconds(trials, kind, value)) == here and bool(here) == (value != "a[bc]{3}")


def test_a_form_that_took_long_leaves_no_large_process_behind(
    trials: GrammarSandbox, running: Callable[[], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "LONG_SECONDS", 0.0)
    assert seconds(trials, "regex", "a?" * 200) > 0
    assert not running() and not trials.waiting
    with pytest.raises(PromptError) as caught:  # whoever keeps the error keeps no process
        seconds(trials, "regex", "(a")
    assert caught and not running()


def test_what_waits_is_asked_next(trials: GrammarSandbox, running: Callable[[], set[int]]) -> None:
    seconds(trials, "regex", "a")
    (first,) = running()
    for number in range(3):
        seconds(trials, "regex", f"b{number}")
        assert running() == {first}


def test_what_ends_this_process_by_a_key_leaves_trials_at_work(
    trials: GrammarSandbox, running: Callable[[], set[int]]
) -> None:
    """Ctrl+C goes to all of a terminal's group."""
    seconds(trials, "regex", "a")
    (pid,) = running()
    assert os.getpgid(pid) != os.getpgid(0)


def test_files_beside_the_program_are_no_modules_of_it(
    trials: GrammarSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A room may have a file of any name; `json.py` would be read in place of Python's own."""
    copied = tmp_path / "compile_grammar.py"
    copied.write_text(Path(program.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "json.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.setattr(program, "__file__", str(copied))
    seconds(trials, "regex", "a")


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_limits_hold_whatever_this_process_does_with_signals(how: str) -> None:
    trials = GrammarSandbox(WORDS, cpu_seconds=0.2, wall_seconds=600)
    handler, mask = signal.getsignal(signal.SIGPROF), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    if how == "ignored":
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
    else:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGPROF,))
    try:
        with pytest.raises(PromptError, match=r"takes more than 0\.2 s"):
            seconds(trials, *SLOW[0])
    finally:
        signal.signal(signal.SIGPROF, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_process_that_ends_before_it_has_read_the_vocabulary_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox.sys, "executable", "/bin/false")
    with pytest.raises(SpyglassError, match="ended at once, with 1"):
        seconds(GrammarSandbox(Words([b"x" * (1 << 20)], [], [0]), cpu_seconds=60), "regex", "a")
