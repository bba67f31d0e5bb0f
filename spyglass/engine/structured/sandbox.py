"""Trials of grammars in processes that can be ended: what takes too long or overflows there never runs here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from spyglass.engine.shares import processor_seconds, wait_giving_way
from spyglass.engine.structured.compile import Words, receive, send
from spyglass.errors import OverloadedError, PromptError, SpyglassError

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
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """The process that forks the others, started when there is none.

        Raises:
            SpyglassError: it cannot be started.
        """
        with self._lock:
            if self._source is None or self._source.ended:  # the system may end what waits, for its memory
                self._source = Source(self._words, self._limits)
            return self._source

    def seconds(self, kind: str, request: str) -> float:
        """CPU time that a grammar takes to compile. `request` is the JSON of its kind and value.

        Raises:
            PromptError: it means nothing, takes too long, or ends the process.
            OverloadedError: the machine was too busy to try it.
            SpyglassError: no process can be started.
        """
        for last in (False, True):
            source = self.source
            try:
                answer, code = source.ask(request.encode())
                break
            except (OSError, EOFError) as error:  # what forks has ended meanwhile
                source.end()
                if last:
                    raise OverloadedError(
                        f"the {kind} asked for cannot be tried now ({error}); send it later"
                    ) from error
        if answer:
            wrong, seconds = json.loads(answer)
            if wrong is not None:
                raise PromptError(wrong)
            return float(seconds)
        raise self._why(kind, -code)

    def _why(self, kind: str, ended: int) -> SpyglassError:
        """What to say of a grammar over which its process was ended by a signal."""
        cpu_seconds, wall_seconds = self._limits
        if ended == signal.SIGALRM:
            return OverloadedError(
                f"the {kind} asked for could not be compiled in {wall_seconds:g} s, so busy is this machine; send it "
                f"again later, or {_ADVICE}",
                retry_after_s=wall_seconds,
            )
        why = f"than {cpu_seconds:g} s" if ended == signal.SIGPROF else "stack or memory than one grammar may have"
        return PromptError(f"the {kind} asked for takes more {why} to compile, so it is refused; {_ADVICE}")


class Source:
    """The process with the vocabulary, which forks one for each grammar.

    Raises:
        SpyglassError: it cannot be started.
    """

    def __init__(self, words: Words, limits: tuple[float, float]) -> None:
        self._lock = threading.Lock()  # of the control channel
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(Path(__file__).with_name("compile.py")), str(theirs.fileno())]
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    process_group=0,  # Ctrl+C is for us, who may let answers end; in another session nice means nothing
                )
            except OSError as error:
                self._control.close()
                raise SpyglassError(f"the process that compiles grammars cannot be started: {error}") from error
        self.end = weakref.finalize(self, _end, self.process, self._control)
        tokens = [word.decode("latin-1") for word in words.tokens]
        try:
            send(self._control, json.dumps([tokens, list(words.silent), list(words.ends), limits]).encode())
            receive(self._control)
        except (OSError, EOFError):
            code = self.process.wait()
            raise SpyglassError(f"the process that compiles grammars ended at once, with {code}") from None

    @property
    def ended(self) -> bool:
        """Whether it can be asked nothing any more."""
        return self.process.poll() is not None

    def ask(self, request: bytes) -> tuple[bytes, int]:
        """The answer of a process of its own, empty if it ended over the request, and how it ended.

        Raises:
            OSError, EOFError: there can be no process, or the one that forks has ended.
        """
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                pid = self._told(b"", theirs.fileno())
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            answer = b""
            with suppress(OSError, EOFError):
                send(ours, request)
                wait_giving_way(ours, pid, processor_seconds(pid))
                answer = receive(ours)[0]
        with self._lock:
            return answer, self._told(str(pid).encode())

    def _told(self, payload: bytes, *fds: int) -> int:
        send(self._control, payload, *fds)
        return int(receive(self._control)[0])


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """With all that it forked."""
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
