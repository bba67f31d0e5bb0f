"""Grammars that nobody can wait for: tried in a process that can be ended, which is ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spyglass.engine import shares
from spyglass.engine.structured import compile as program
from spyglass.engine.structured import sandbox
from spyglass.engine.structured.compile import Words, compile_grammar, run_deep
from spyglass.engine.structured.sandbox import GrammarSandbox
from spyglass.errors import OverloadedError, PromptError, SpyglassError

WORDS = Words([bytes((byte,)) for byte in range(256)] + [b"ab", b""], [257], [257])
SLOW: list[tuple[str, Any]] = [
    ("regex", "a?" * 20_000),
    ("grammar", "start: A\nA: " + " & ".join(f"/(.{{{count}}})*/" for count in range(2, 20))),
    ("json_schema", {"allOf": [{"type": "string", "pattern": f"a.*b{{{n}}}", "minLength": n} for n in range(30)]}),
]


@pytest.fixture
def trials() -> Iterator[GrammarSandbox]:
    made = GrammarSandbox(WORDS, cpu_seconds=1.0, wall_seconds=600)
    yield made
    made.source.end()


def seconds(trials: GrammarSandbox, kind: str, value: Any) -> float:
    return trials.seconds(kind, json.dumps([kind, value]))


def in_thread(trials: GrammarSandbox, kind: str, value: Any) -> Callable[[], BaseException | None]:
    """Try a form in a thread; the call waits for what it raised."""
    pool = ThreadPoolExecutor(1)
    work = pool.submit(seconds, trials, kind, value)
    pool.shutdown(wait=False)
    return work.exception


def wait_for(fact: Callable[[], Any]) -> Any:
    """What `fact` says, once it says something."""
    until = time.monotonic() + 120
    while not (found := fact()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)
    return found


def children(pid: int) -> set[int]:
    """Processes that one has forked and not asked for yet."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.parametrize(("kind", "value"), SLOW, ids=["pattern", "grammar", "allOf"])
def test_a_form_that_takes_too_long_is_refused_and_nothing_stays_busy(
    trials: GrammarSandbox, kind: str, value: Any
) -> None:
    with pytest.raises(PromptError, match=f"the {kind} asked for takes more than 1 s to compile.*make it smaller"):
        seconds(trials, kind, value)
    assert not children(trials.source.process.pid)
    seconds(trials, "regex", "ab*")  # the next one is tried as ever


def test_what_overflows_ends_the_trial_and_not_us(trials: GrammarSandbox) -> None:
    ended = in_thread(trials, *SLOW[0])
    os.kill(wait_for(lambda: children(trials.source.process.pid)).pop(), signal.SIGSEGV)
    assert "the regex asked for takes more stack or memory than one grammar may have" in str(ended())
    seconds(trials, "regex", "b")


def test_a_source_that_was_ended_while_it_waited_is_no_fault_of_a_form(trials: GrammarSandbox) -> None:
    seconds(trials, "regex", "a")
    trials.source.process.kill()
    seconds(trials, "regex", "b")


def test_a_source_that_is_ended_at_work_is_replaced_and_the_form_tried_again() -> None:
    trials = GrammarSandbox(WORDS, cpu_seconds=1, wall_seconds=600)
    source = trials.source
    ended = in_thread(trials, *SLOW[0])
    wait_for(lambda: children(source.process.pid))
    source.process.kill()
    assert "takes more than 1 s to compile" in str(ended())
    assert trials.source is not source
    trials.source.end()


def test_a_machine_that_is_too_busy_is_no_fault_of_a_form() -> None:
    trials = GrammarSandbox(WORDS, cpu_seconds=60, wall_seconds=0.1)
    with pytest.raises(OverloadedError, match=r"could not be compiled in 0\.1 s.*send it again later") as caught:
        seconds(trials, *SLOW[0])
    assert caught.value.retry_after_s == 0.1 and not children(trials.source.process.pid)
    trials.source.end()


def test_any_number_of_forms_is_tried_at_a_time_and_leaves_one_process(trials: GrammarSandbox) -> None:
    source = trials.source
    threads = [threading.Thread(target=seconds, args=(trials, "regex", f"a{number}")) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trials.source is source and not children(source.process.pid)


def threads_at_work(pid: int) -> list[int]:
    """All of a process, once one beside the first is there: grammars are compiled in a thread with a deep stack."""
    found = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return found if len(found) > 1 else []


def test_a_form_that_takes_long_gives_way_more_and_a_short_one_waits_for_no_long_one(
    trials: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "LEVELS", ((0.0, 10),))
    ended = in_thread(trials, *SLOW[0])
    (pid,) = wait_for(lambda: children(trials.source.process.pid))
    nicest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    tasks = [pid] if sys.platform != "linux" else wait_for(lambda: threads_at_work(pid))
    wait_for(lambda: all(os.getpriority(os.PRIO_PROCESS, task) >= nicest for task in tasks))
    seconds(trials, "regex", "short")
    assert pid in children(trials.source.process.pid)
    assert "takes more than 1 s" in str(ended())


def test_a_trial_gives_way_to_the_steps_of_an_engine_and_hears_no_ctrl_c(trials: GrammarSandbox) -> None:
    """Where sessions share the processors between them, it must be in ours, or its niceness means nothing."""
    pid = trials.source.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 2)
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
