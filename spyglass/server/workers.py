"""Requests read and images unpacked in a few processes that can be ended (`reading`): what takes too long or too much
there never runs here."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from spyglass.engine.shares import processor_seconds, wait_giving_way
from spyglass.errors import OverloadedError, PromptError, SpyglassError
from spyglass.prompt.build import Pixels
from spyglass.prompt.decode import ImageRules
from spyglass.prompt.tokens import ImagePlan
from spyglass.server.exchange import Call, Immediate, Served
from spyglass.server.limits import READING_BYTES, READING_CPU_SECONDS, READING_SECONDS
from spyglass.server.passing import (
    ReadBody,
    Refusal,
    Result,
    UnpackImage,
    Wanted,
    receive,
    receive_value,
    send,
    send_value,
)

_LOG = logging.getLogger(__name__)
_KEPT = 4  # processes that wait for the next request
# Found where this process finds it, and imported by its name, since its classes travel.
_PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from spyglass.server.reading import main; main()"
_TOO_MUCH = "takes too long or too much memory to"


class Job:
    """The work of one request, which may be ended from any thread when nobody waits for it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.over = False

    def end(self) -> None:
        """End the work now, or when it begins."""
        with self._lock:
            self.over = True
            if self._process is not None:
                self._process.kill()

    def works_in(self, process: _Process | None) -> None:
        """Note where the work is done."""
        with self._lock:
            self._process = process
            if self.over and process is not None:
                process.kill()


class _Process:
    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid, self.channel = pid, channel

    def kill(self) -> None:
        """It is waited for only later (`Workers._ended`), so the number is still its own."""
        os.kill(self.pid, signal.SIGKILL)


class Workers:
    """Processes that read requests for the model that is `served`. Any thread may call it; each call has one of its
    own meanwhile."""

    def __init__(
        self,
        served: Served,
        *,
        cpu_seconds: float = READING_CPU_SECONDS,
        wall_seconds: float = READING_SECONDS,
        memory: int = READING_BYTES,
    ) -> None:
        self._known = {"tokenizer": served.tokenizer, "config": served.config, "served": served}
        begin = replace(served, adapter_names=tuple, unpack=None), cpu_seconds, wall_seconds, memory
        self._begin = pickle.dumps(begin, protocol=5)
        self._lock = threading.Lock()  # of what follows
        self._waiting: list[_Process] = []
        self._source: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to load what the processes need, else the first request would wait a second for it."""
        with self._lock:
            self._open_source()

    def unpack(self, file: bytes, rules: ImageRules, plan: ImagePlan, name: str) -> Pixels:
        """The patches of an image, as `unpack_image`.

        Raises:
            PromptError: it cannot be unpacked, or takes too long or too much memory.
            OverloadedError: the process was ended from outside.
            SpyglassError: no process can be started.
        """
        work = UnpackImage(file=pickle.PickleBuffer(file), rules=rules, plan=plan, name=name)
        pixels = self._run(work, Job(), f"{name} {_TOO_MUCH} unpack")
        assert isinstance(pixels, np.ndarray)
        return pixels

    def read(
        self,
        path: str,
        body: bytes,
        adapters: tuple[str, ...],
        remote: Mapping[str, bytes | SpyglassError] | None,
        job: Job,
    ) -> Call | Immediate | Wanted:
        """The call of a body, or what must be fetched before (see `ReadBody`).

        Raises:
            SpyglassError: as `Endpoint.parse` and `unpack`.
        """
        images = {name: pickle.PickleBuffer(v) if isinstance(v, bytes) else v for name, v in (remote or {}).items()}
        passed = None if remote is None else images
        work = ReadBody(path=path, body=pickle.PickleBuffer(body), adapters=adapters, remote=passed)
        found = self._run(work, job, f"the request {_TOO_MUCH} read")
        assert isinstance(found, Call | Immediate | Wanted)
        return found

    def close(self) -> None:
        """End the processes that wait, and later those that work."""
        with self._lock:
            waiting, self._waiting, self._closed = self._waiting, [], True
            for process in waiting:
                self._end(process)
            self._close_source()

    def _run(self, work: ReadBody | UnpackImage, job: Job, too_much: str) -> Result:
        with self._lock:
            process = self._waiting.pop() if self._waiting else self._fork()
        goes_on = False
        try:
            job.works_in(process)
            began = processor_seconds(process.pid)
            send_value(process.channel, work)
            gave_way = wait_giving_way(process.channel, process.pid, began)
            result, goes_on = receive_value(process.channel, self._known)
        except (OSError, EOFError) as error:
            job.works_in(None)
            with self._lock:
                code = self._end(process)
            raise _why(code, error, job, too_much) from error
        job.works_in(None)
        with self._lock:
            if goes_on and not gave_way and not job.over and not self._closed and len(self._waiting) < _KEPT:
                self._waiting.append(process)
            else:
                self._end(process)
        if isinstance(result, Refusal):
            raise result.error()
        return result

    def _fork(self) -> _Process:
        """Raises SpyglassError: there can be no process. The caller has the lock."""
        for last in (False, True):
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise _none(error) from error
            with theirs:
                try:
                    _, control = self._open_source()
                    send(control, b"", theirs.fileno())
                    return _Process(int(receive(control)[0]), ours)
                except (OSError, EOFError) as error:  # what forks has ended, or could not fork
                    ours.close()
                    self._close_source()
                    if last:
                        raise _none(error) from error
        raise AssertionError

    def _end(self, process: _Process) -> int:
        """How it ended. The caller has the lock."""
        try:
            process.channel.close()
            process.kill()
            if self._source is not None:
                send(self._source[1], str(process.pid).encode())
                return int(receive(self._source[1])[0])
        except (OSError, EOFError, ValueError):
            pass
        return -signal.SIGKILL

    def _open_source(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Raises OSError, EOFError. The caller has the lock."""
        if self._source is None:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    process = subprocess.Popen(
                        [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), *sys.path],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        process_group=0,  # Ctrl+C is for us, who may let answers end
                    )
                except OSError:
                    ours.close()
                    raise
            self._source = process, ours
            send(ours, self._begin)
        return self._source

    def _close_source(self) -> None:
        if self._source is not None:
            process, control = self._source
            self._source = None
            control.close()
            process.kill()
            if (code := process.wait()) != -signal.SIGKILL:
                _LOG.error("the process that starts readers of requests has ended, with %d", code)


def _why(code: int, error: Exception, job: Job, too_much: str) -> SpyglassError:
    """What to say of a process that ended over a request, or of what could not be had from it."""
    if job.over:
        return SpyglassError("nobody waits for this request")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return OverloadedError(f"the request cannot be read now ({error.strerror}); send it later")
    if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return OverloadedError("the process that read this request was ended from outside; send it again")
    return PromptError(f"{too_much}; send it smaller")


def _none(error: Exception) -> SpyglassError:
    return OverloadedError(
        f"no process that reads requests can be started ({error or 'it ended at once'}); send it later"
    )
