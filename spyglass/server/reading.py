"""A program that reads requests and unpacks images in processes that can be ended.

Decoders, tokenizers and readers of JSON are other people's loops: a small input may keep one busy for hours, panic, or
hold the interpreter's lock while streams wait. `workers` starts this program once; whenever it asks, the program forks
a process that reads one request after another, with everything loaded that reading needs, and no torch.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import sys
from dataclasses import replace

from spyglass.errors import PromptError, SpyglassError, is_recoverable
from spyglass.prompt.build import Pixels, unpack_image
from spyglass.prompt.decode import ImageRules, open_image
from spyglass.prompt.tokens import ImagePlan
from spyglass.server.body import parse_json
from spyglass.server.exchange import Call, Immediate, Served
from spyglass.server.memory import trim
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
from spyglass.server.protocols.endpoints import make_endpoints
from spyglass.server.writing import encoded

LARGE = 384 << 20  # resident bytes that a process may have taken and still be kept
_NICE = 2  # than the engine; what takes long gives way more (`wait_giving_way`)


class Reader:
    """Does the jobs of one process."""

    def __init__(self, served: Served, cpu_seconds: float, wall_seconds: float, memory: int) -> None:
        self._limits, self._memory = (cpu_seconds, wall_seconds), memory
        self._adapters: tuple[str, ...] = ()
        self._served = replace(served, adapter_names=lambda: self._adapters, unpack=self._unpack)
        self._endpoints = {endpoint.path: endpoint for endpoint in make_endpoints(self._served)}

    def serve(self, channel: socket.socket) -> None:
        """One job after another, until nobody asks or the process has grown large. What takes too long ends it."""
        os.nice(_NICE)
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        most = resource.getrlimit(resource.RLIMIT_AS)[1]  # which nobody may raise
        memory = self._memory if most == resource.RLIM_INFINITY else min(self._memory, most)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            job = receive_value(channel, {})
            _limit(*self._limits)
            result = self._run(job)
            _limit(0, 0)
            del job
            goes_on = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < LARGE
            try:
                send_value(channel, (result, goes_on))
            except (pickle.PicklingError, TypeError, AttributeError) as error:  # before anything has been sent
                send_value(channel, (Refusal.of(error), goes_on))
            if not goes_on:
                return

    def _run(self, job: ReadBody | UnpackImage) -> Result:
        try:
            return self._read(job) if isinstance(job, ReadBody) else unpack(job)
        except MemoryError:
            return Refusal.of(PromptError("the request takes too much memory to read; send less at once"))
        except BaseException as error:
            if isinstance(error, Exception) or not is_recoverable(error):
                return Refusal.of(error)
            return Refusal.of(PromptError(f"a library cannot read this request ({error!r:.200}); send less at once"))

    def _read(self, job: ReadBody) -> Call | Immediate | Wanted:
        self._adapters = job.adapters
        wanted: list[str] = []

        def fetch(address: str) -> bytes:
            found = (job.remote or {}).get(address)
            if isinstance(found, SpyglassError):
                raise found
            if found is None:
                wanted.append(address)
            return bytes(found or b"")

        try:
            call = self._endpoints[job.path].parse(parse_json(bytes(job.body)), None if job.remote is None else fetch)
        except SpyglassError:
            if not wanted:  # else perhaps of what is not here yet
                raise
        return Wanted(tuple(wanted)) if wanted else encoded(call)

    def _unpack(self, file: bytes, rules: ImageRules, plan: ImagePlan, name: str) -> Pixels:
        _limit(*self._limits)  # each image may take so much, and what comes behind it again
        try:
            return unpack(UnpackImage(file=file, rules=rules, plan=plan, name=name))
        finally:
            _limit(*self._limits)


def unpack(job: UnpackImage) -> Pixels:
    """The patches of an image.

    Raises:
        PromptError: damaged data, or another size than its header said.
    """
    image = open_image(bytes(job.file), name=job.name)
    pixels = unpack_image(image, job.rules, job.plan, job.name)
    return pixels if pixels.flags.c_contiguous else pixels.copy()


def _limit(cpu_seconds: float, wall_seconds: float) -> None:
    """End the process when so much time has gone by, wherever it is then; 0 = never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def main() -> None:
    """The program, until whoever started it is gone."""
    try:
        _fork_readers(socket.socket(fileno=int(sys.argv[1])))
    except EOFError:
        return


def _fork_readers(control: socket.socket) -> None:
    """Load what reading needs; then for each open file that comes fork a process that serves it and tell its number,
    and for each number tell how that process ended."""
    payload, _ = receive(control)
    reader = Reader(*pickle.loads(payload))
    gc.collect()
    trim()
    gc.freeze()
    while True:
        payload, fds = receive(control)
        if not fds:
            _, status = os.waitpid(int(payload), 0)
            send(control, str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            code = 1  # of what is no signal, such as the lack of memory
            try:
                reader.serve(socket.socket(fileno=fds[0]))
                code = 0
            finally:
                os._exit(code)
        os.close(fds[0])
        send(control, str(pid).encode())
