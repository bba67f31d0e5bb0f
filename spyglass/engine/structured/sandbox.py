"""Trials of grammars in processes that can be ended: what takes too long or overflows there never runs here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from spyglass.engine.structured.compile import Words
from spyglass.errors import OverloadedError, PromptError, SpyglassError

KEPT = 2  # processes that wait for the next grammar, some 100 MB each
LONG_SECONDS = 0.25  # seconds; a grammar that takes longer leaves a large process behind, which is not kept
_WALL_SECONDS = 60.0  # on a machine that is too busy to give it what it may take of a processor
_ADVICE = "make it smaller: fewer alternatives, repetitions and references, and counts (a{0,9}) in place of copies"


class GrammarSandbox:
    """Tries grammars for one vocabulary. Any thread may call it; each call has a process of its own meanwhile.

    One grammar may take so many seconds of a processor (it is compiled once more where it is used), and so many of the
    clock.
    """

    def __init__(self, words: Words, *, cpu_seconds: float, wall_seconds: float = _WALL_SECONDS) -> None:
        self._words, self._limits = words, (cpu_seconds, wall_seconds)
        self._lock = threading.Lock()
        self.waiting: list[_Process] = []

    def seconds(self, kind: str, request: str) -> float:
        """CPU time that a grammar takes to compile. `request` is the JSON of its kind and value.

        Raises:
            PromptError: it means nothing, takes too long, or ends the process.
            OverloadedError: the machine was too busy to try it.
            SpyglassError: no process can be started.
        """
        with self._lock:
            process = self.waiting.pop() if self.waiting else None
        if process is None or process.ended:  # the system may end what waits, for its memory
            process = _Process(self._words, self._limits)
        wrong, seconds = process.ask(kind, request)
        with self._lock:
            keeps = seconds < LONG_SECONDS and len(self.waiting) < KEPT
            if keeps:
                self.waiting.append(process)
        if not keeps:
            process.end()
        if wrong is not None:
            raise PromptError(wrong)
        return seconds


class _Process:
    def __init__(self, words: Words, limits: tuple[float, float]) -> None:
        self._limits = limits
        command = [sys.executable, "-P", str(Path(__file__).with_name("compile.py"))]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                process_group=0,  # Ctrl+C is for us, who may let answers end; in another session nice means nothing
            )
        except OSError as error:
            raise SpyglassError(f"the process that compiles grammars cannot be started: {error}") from error
        self.process = process
        self.end = weakref.finalize(self, _end, process)
        tokens = [word.decode("latin-1") for word in words.tokens]
        start = json.dumps([tokens, list(words.silent), list(words.ends), limits])
        if json.loads(self.exchange(start) or "null") != "ready":
            raise SpyglassError(f"the process that compiles grammars ended at once, with {process.wait()}")

    @property
    def ended(self) -> bool:
        """Whether it can be asked nothing any more."""
        return self.process.poll() is not None

    def ask(self, kind: str, request: str) -> tuple[str | None, float]:
        """What is wrong with a grammar, None = nothing, and the seconds it took.

        Raises:
            PromptError, OverloadedError: the process ended over it.
        """
        answer = self.exchange(request)
        if answer:
            wrong, seconds = json.loads(answer)
            return wrong, seconds
        cpu_seconds, wall_seconds = self._limits
        ended = -self.process.wait()
        if ended == signal.SIGALRM:
            raise OverloadedError(
                f"the {kind} asked for could not be compiled in {wall_seconds:g} s, so busy is this machine; send it "
                f"again later, or {_ADVICE}",
                retry_after_s=wall_seconds,
            )
        why = f"than {cpu_seconds:g} s" if ended == signal.SIGPROF else "stack or memory than one grammar may have"
        raise PromptError(f"the {kind} asked for takes more {why} to compile, so it is refused; {_ADVICE}")

    def exchange(self, line: str) -> str:
        """The line that comes back; empty if the process ends first."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            return ""
        return stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
