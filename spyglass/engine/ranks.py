"""Ranks 1 to N - 1 of a divided model, as rank 0 sees them: processes that do with their parts what it does with its.

Every decision is made once, by rank 0, and sent before it is carried out: what a step holds, what changes rows and
adapters, whether logits are wanted. Messages are read in their order, so the same code on all ranks, fed the same
inputs, captures and replays the same steps. Whatever goes wrong in one of them ends all: none can go on alone.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from spyglass.errors import RankError, SpyglassError
from spyglass.parallel.channel import Ring, Sender
from spyglass.parallel.processes import ProcessGroup, meet

BEAT_S = 1.0  # between signs of life of a rank
SILENT_S = 7.0  # without one it hangs
MEET_S = 120.0  # until all processes have imported what they need
COLLECTIVE_S = 600.0  # a rank that lives, but does not come to a sum
_END_S = 3.0  # until a rank that was told to end is killed
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank is told first. `folder` is where ranks meet; `load` are arguments of `load_model`."""

    rank: int
    size: int
    folder: str
    device: str
    threads: int
    load: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class _State:
    """The processes, and what has become of them; the thread that watches them holds no more than this."""

    folder: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    bells: list[int] = field(default_factory=list)
    ring: Ring | None = None
    group: ProcessGroup | None = None
    answers: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    failure: str | None = None
    failed: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)  # who holds it may send
    closed: bool = False

    def fail(self, why: str) -> None:
        """Remember the first thing that went wrong, and end all processes."""
        if self.failure is None and not self.closed:
            self.failure = why
            _LOG.critical("%s; all ranks are ended", why)
        for process in self.processes:
            process.kill()
        self.failed.set()
        self.answers.put(None)

    def name(self, number: int) -> str:
        return f"rank {number + 1} (process {self.processes[number].pid})"


class Ranks:
    """Starts them; they load their parts while rank 0 loads its own. `group` is what all of them sum in.

    Calls may come from any thread; one that has sent something carries out the same before the next one sends.

    Raises:
        RankError: one of them cannot be started.
    """

    def __init__(self, size: int, device: torch.device, load: Mapping[str, Any], *, threads: int) -> None:
        self.size, self.device = size, device
        self.pending: list[
            tuple[int, str, tuple[Any, ...]]
        ] = []  # (memory, operation, arguments) since the last message
        self._seats = 0
        state = self._state = _State(folder=tempfile.mkdtemp(prefix="spyglass-ranks-"))
        self.close = weakref.finalize(self, _end, state)
        state.ring = Ring.new()
        if state.ring is None:
            _LOG.warning("no shared memory is to be had (memfd): steps are sent through pipes, which takes longer")
        with ExitStack() as stack:
            stack.callback(self.close)
            for rank in range(1, size):
                _start(state, rank)
            threading.Thread(target=_watch, args=(state,), name="ranks", daemon=True).start()
            self._sender = Sender(state.pipes, state.ring, state.bells, self.require_alive)
            with self.turn():
                for rank, pipe in enumerate(state.pipes, start=1):
                    place = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else str(device)
                    pipe.send(
                        RankStart(rank=rank, size=size, folder=state.folder, device=place, threads=threads, load=load)
                    )
                self.answers(MEET_S)
                self.group = state.group = meet(state.folder, 0, size, device, timeout_s=COLLECTIVE_S)
            stack.pop_all()

    @property
    def failure(self) -> str | None:
        """What ended them, None while they live."""
        return self._state.failure

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 to N - 1."""
        return [process.pid for process in self._state.processes]

    def require_alive(self) -> None:
        """Raises RankError if they have been ended."""
        if self._state.failure is not None or self._state.closed:
            raise RankError(f"{self._state.failure or 'the processes of this model have been ended'}; load it again")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, something is sent and done. If that fails here, others are out of step, and all of them are ended.

        Raises:
            RankError: it failed, here or in another rank.
        """
        with self._state.lock:
            self.require_alive()
            try:
                yield
            except Exception as error:
                self._state.failed.wait(_END_S)  # what another rank has to say is the cause
                self._state.fail(f"rank 0 failed: {type(error).__name__}: {error}")
                raise RankError(f"{self._state.failure}; load the model again") from error
            except BaseException:  # Ctrl-C in the middle of a step
                self._state.fail("rank 0 was interrupted in a step")
                raise

    def send(self, kind: str, *payload: Any) -> None:
        """Have all ranks do something, behind the changes of memory that are pending."""
        self._sender.send(pickle.dumps((kind, self._taken(), payload), pickle.HIGHEST_PROTOCOL))

    def send_each(self, kind: str, payloads: Sequence[Any]) -> None:
        taken = self._taken()
        self._sender.send_each([pickle.dumps((kind, taken, (one,)), pickle.HIGHEST_PROTOCOL) for one in payloads])

    def answers(self, wait_s: float | None = None) -> list[Any]:
        """One answer of each rank to what was sent.

        Raises:
            RankError: they have been ended, or do not answer.
        """
        found = []
        for _ in range(self.size - 1):
            try:
                found.append(self._state.answers.get(timeout=wait_s))
            except queue.Empty:
                self._state.fail(f"the ranks have not started within {MEET_S:g} s")
            self.require_alive()
        return found

    def new_memory(self) -> int:
        """The number of a memory that all ranks will have."""
        self._seats += 1
        return self._seats

    def least_free(self, free: int | None) -> int | None:
        """Of the bytes that are free here: what each rank can have of them, and each GPU of its own."""
        if free is None or self.device.type == "cpu":
            return free if free is None else free // self.size
        with self.turn():
            self.send("free")
            return min(free, *self.answers())

    def _taken(self) -> list[tuple[int, str, tuple[Any, ...]]]:
        taken, self.pending[:] = list(self.pending), []
        return taken


def _start(state: _State, rank: int) -> None:
    ours, theirs = Pipe()
    handed = [theirs.fileno()]
    if state.ring is not None:
        state.bells.append(os.eventfd(0, os.EFD_SEMAPHORE))
        handed += [state.ring.descriptor, state.bells[-1]]
    state.pipes.append(ours)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "spyglass.engine.rank", *map(str, handed)],
            stdin=subprocess.DEVNULL,
            pass_fds=handed,
            process_group=0,  # Ctrl-C is for rank 0, which may let answers end
        )
    except OSError as error:
        raise RankError(f"rank {rank} of a divided model cannot be started: {error}") from error
    finally:
        theirs.close()
    state.processes.append(process)
    state.beats.append(time.monotonic() + MEET_S)


def _watch(state: _State) -> None:
    """Until they end: answers go to who waits for them; silence, a failure or an end is noted."""
    numbers = {pipe: number for number, pipe in enumerate(state.pipes)}
    while not state.closed and state.failure is None:
        try:
            ready = wait(list(numbers), timeout=BEAT_S / 2)
        except OSError:  # they are being closed
            return
        for pipe in ready:
            assert isinstance(pipe, Connection)
            number = numbers[pipe]
            try:
                kind, payload = pipe.recv()
            except (EOFError, OSError):
                if not state.closed:
                    state.fail(f"{state.name(number)} has ended{_how(state.processes[number])}")
                return
            state.beats[number] = time.monotonic()
            if kind == "answer":
                state.answers.put(payload)
            elif kind == "failed":
                state.fail(f"{state.name(number)} failed: {payload}")
        for number, beat in enumerate(state.beats):
            if time.monotonic() - beat > SILENT_S:
                state.fail(f"{state.name(number)} hangs: it gave no sign of life for {SILENT_S:g} s")


def _how(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_S)
        return f" with signal {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
    return ""


def _end(state: _State) -> None:
    """Tell them to end, kill those that do not, and give everything back. Once."""
    idle = state.lock.acquire(timeout=_END_S)
    state.closed = True
    if idle and state.failure is None and state.group is not None:
        with suppress(OSError, SpyglassError):
            message = pickle.dumps(("stop", [], ()))
            Sender(state.pipes, state.ring, state.bells, lambda: None).send(message)
            for process in state.processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
    for process in state.processes:
        process.kill()
        process.wait()
    if state.group is not None:
        state.group.close()
    for pipe in state.pipes:
        pipe.close()
    for bell in state.bells:
        os.close(bell)
    if state.ring is not None:
        state.ring.close()
    shutil.rmtree(state.folder, ignore_errors=True)
    if idle:
        state.lock.release()


def answer_free(measure: Callable[[], int | None]) -> int:
    """Free bytes as a rank reports them."""
    free = measure()
    return sys.maxsize if free is None else free
