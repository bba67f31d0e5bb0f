"""How one engine is shared. Several clients: whose turn it is, in a step and before one; how many rows each is due, and
how many places it may take. Prompts and answers: how much of a step prompts may take. Processes: what they leave to it.

A client is whoever's requests count together (a key of the server). Its recent use is the tokens that steps ran for it,
forgotten over `_MEMORY` steps, divided by its share. Who has used less comes first, so a client that asks for little
does not notice one that asks for everything, and one that asks for everything falls back to its share (compare
"Fairness in Serving Large Language Models", OSDI 2024, whose counters never forget).
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

_MEMORY = 1024  # steps, after which 1/e of a use is left
_FIRST = 256  # tokens of prompts, before anything was measured
_ALONE = 8.0  # targets that a step of one prompt may take
_LONGEST_S = 1.0  # of a step between whose layers others run, unless the wait is longer
_LEAST = 16  # tokens of prompts that any step may have, so that a slow machine gets on
_UP, _DOWN = 0.5, 0.1  # how far an estimate goes towards a measurement above it, and below it
_MOST_UP = 4.0  # of an estimate: what a measurement above it counts at most
# Seconds of a processor, and how much nicer than the engine a process is that has had them since its work began, which
# nobody but an administrator can take back. Nearly all that is refused is refused before the first.
LEVELS = ((0.25, 5), (1.0, 10))
_LEAST_SECONDS = 0.01  # between two looks at them
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks. Clients that want more than there is get it in proportion to their shares."""

    name: str = ""
    share: int = 1


ANYBODY = Client()


class RecentUse:
    """Tokens of each client in the last steps."""

    def __init__(self) -> None:
        self._tokens: dict[Client, float] = {}

    def count(self, tokens: Mapping[Client, int]) -> None:
        """A step has so many tokens of each client."""
        kept = {client: used * (1 - 1 / _MEMORY) for client, used in self._tokens.items() if used > 1}
        for client, more in tokens.items():
            kept[client] = kept.get(client, 0.0) + more
        self._tokens = kept

    def of(self, client: Client) -> float:
        """What a client has used, per share."""
        return self._tokens.get(client, 0.0) / client.share


def due_rows(active: Iterable[Client], rows: int) -> dict[Client, int]:
    """How many of `rows` each of the active clients may insist on: its share of them, one at least."""
    clients = dict.fromkeys(active)
    total = sum(client.share for client in clients)
    return {client: max(1, rows * client.share // total) for client in clients}


class Places:
    """`most` places for the clients of a server. Half of them are for whoever comes; of the other half each of the
    named `clients` has its share to itself, one at least. A single client, or an unnamed one, may have all. Not
    thread-safe."""

    def __init__(self, most: int, clients: Sequence[Client] = ()) -> None:
        shares = sum(client.share for client in clients)
        several = clients if len(clients) > 1 else ()
        self.most = most
        self._own = {client: max(1, most // 2 * client.share // shares) for client in several}
        self._common = max(0, most - sum(self._own.values()))
        self._taken = Counter[Client]()

    @property
    def num_taken(self) -> int:
        """Places that are taken, by anybody."""
        return self._taken.total()

    def most_of(self, client: Client) -> int:
        """What a client may take when nobody else has any."""
        return self._common + self._own.get(client, 0)

    def has_room(self, client: Client, count: int = 1) -> bool:
        """Whether a client may take so many more."""
        after = self._taken.copy()
        after[client] += count
        common = sum(max(0, taken - self._own.get(who, 0)) for who, taken in after.items())
        return common <= self._common or after[client] <= self._own.get(client, 0)

    def take(self, client: Client, count: int = 1) -> None:
        """Take places; whoever has to ask asks before. A negative count gives them back."""
        self._taken[client] += count
        if not self._taken[client]:
            del self._taken[client]


class Turns:
    """Lets `most` pieces of work run at a time, and twice as many where clients come for whom none runs: those need not
    wait for what others sent. Of several that wait, the next is the oldest of the client with the fewest that run, per
    share. Any thread."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._running = Counter[Client]()
        self._waiting: dict[Client, deque[Callable[[], object]]] = {}

    @contextmanager
    def of(self, client: Client) -> Iterator[None]:
        """Wait for a turn, and have it meanwhile."""
        self.take(client)
        try:
            yield
        finally:
            self.give_back(client)

    def take(self, client: Client) -> None:
        come = threading.Event()
        self._queue(client, come.set)
        come.wait()

    def give_back(self, client: Client) -> None:
        with self._lock:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
        self._begin()

    def submit(self, client: Client, threads: Executor, work: Callable[[], _R]) -> Future[_R]:
        """Do something in one of these threads when the turn has come; no thread waits for it."""
        done: Future[_R] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                self.give_back(client)
                done.set_exception(error)
            else:
                self.give_back(client)
                done.set_result(result)

        self._queue(client, lambda: threads.submit(run))
        return done

    def _queue(self, client: Client, begin: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.setdefault(client, deque()).append(begin)
        self._begin()

    def _begin(self) -> None:
        while (begin := self._next()) is not None:
            begin()

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            new = [client for client in self._waiting if not self._running[client]]
            if not self._waiting or self._running.total() >= (2 * self._most if new else self._most):
                return None
            client = min(new or self._waiting, key=lambda c: self._running[c] / c.share)
            queue = self._waiting[client]
            begin = queue.popleft()
            if not queue:
                del self._waiting[client]
            self._running[client] += 1
            return begin


@dataclass(slots=True)
class _Estimate:
    """Seconds of one unit of work, lately; None before the first measurement."""

    seconds: float | None = None

    def follow(self, seconds: float) -> None:
        """Take a measurement. A machine that became slow is believed sooner than one that became fast."""
        if self.seconds is None:
            self.seconds = seconds
            return
        seconds = min(seconds, _MOST_UP * self.seconds + 1e-6)
        self.seconds += (_UP if seconds > self.seconds else _DOWN) * (seconds - self.seconds)


class Pace:
    """How much of prompts a step may have so that it takes `target_s` seconds, by what steps took lately. What comes
    out does not depend on how a prompt was cut; only when it comes does. One thread calls it.

    `slice_s`: where answers can get tokens between the layers of a step with prompts, how long they wait at most.
    """

    def __init__(self, target_s: float, slice_s: float | None = None) -> None:
        self._target_s, self.slice_s = target_s, slice_s
        self.forget()

    def forget(self) -> None:
        """What was measured is no measure of what comes: it was a warm-up."""
        self._answers, self._token, self._cell = _Estimate(), _Estimate(), _Estimate()
        self._began: float | None = None
        self._ended = 0.0
        self._tokens = self._cells = 0
        self._with_answers = False

    @property
    def cell_tokens(self) -> float:
        """How many tokens of a prompt take as long as one row of an image in the tower."""
        if self._cell.seconds is None or not self._token.seconds:
            return 1.0
        return max(0.01, self._cell.seconds / self._token.seconds)

    def prompt_tokens(self, *, alone: bool = False) -> int:
        """Tokens of prompts in a step: what fits into the target behind the work of answers, but always a third of such
        a step, and some tokens. One that is `alone` may take longer, as nobody but who comes meanwhile waits for it."""
        if self._token.seconds is None:
            return _FIRST
        answers_s = self._answers.seconds or 0.0
        seconds = _ALONE * self._target_s if alone else max(self._target_s - answers_s, answers_s / 2)
        return max(_LEAST, int(min(seconds / max(self._token.seconds, 1e-9), 1 << 30)))

    def wait_s(self, answers_s: float) -> float | None:
        """How long answers wait between the layers of a step, if a step of theirs takes `answers_s`: twice that at
        least, so that prompts have two thirds of the time. None where they wait for its end."""
        return None if self.slice_s is None else max(self.slice_s, 2 * answers_s)

    def leaves_answers_out(self, tokens: float) -> bool:
        """Whether answers get their tokens between the layers of a step with so much work for prompts, in tokens,
        because that step takes longer than they should wait."""
        return self.slice_s is not None and tokens * (self._token.seconds or 1.0) > self.slice_s

    def ran(self, began: float, tokens: int, cells: int, *, read: bool, answers: bool = True) -> None:
        """A step with so many tokens of prompts and rows from the tower has ended, which also had `answers`; it began
        at `began` of the clock `time.perf_counter`. Unless it was `read`, a device may still be at it, and it is
        measured with the next one."""
        self._began = began if self._began is None else min(began, self._began)
        self._with_answers |= answers
        self._tokens, self._cells = self._tokens + tokens, self._cells + cells
        if not read:
            return
        now, tokens, cells = time.perf_counter(), self._tokens, self._cells
        seconds = now - max(self._began, self._ended)  # a device begins when the step before has ended
        beside = self._answers.seconds or 0.0 if self._with_answers else 0.0
        self._began, self._ended, self._tokens, self._cells, self._with_answers = None, now, 0, 0, False
        if not tokens and not cells:
            self._answers.follow(seconds)
            return
        seconds = max(0.0, seconds - beside)
        if not cells:
            self._token.follow(seconds / tokens)
        elif not tokens or self._token.seconds is not None:
            self._cell.follow(max(0.0, seconds - tokens * (self._token.seconds or 0.0)) / cells)


def make_pace(wait_s: float, layers: int | None) -> Pace:
    """The pace where answers may wait so long, 0 = for ever. `layers` of the text part, where steps of answers run
    between those of others: one layer takes half of the wait, and all of them at most a second or the wait, since who
    comes or leaves meanwhile waits for the end of the step."""
    if not wait_s or layers is None:
        return Pace(wait_s)
    return Pace(min(layers * wait_s / 2, max(wait_s, _LONGEST_S)), wait_s)


def processor_seconds(pid: int) -> float:
    """What a process has had of processors, where its clock can be read (Linux). Raises OSError: it has ended."""
    return time.clock_gettime((~pid << 3) | 2) if sys.platform == "linux" else time.monotonic()


def wait_giving_way(
    channel: socket.socket, pid: int, began: float, used: Callable[[int], float] = processor_seconds
) -> bool:
    """Wait until a process says something, has ended, or stands at the last of `LEVELS`, at each of which it gives way
    more. Whether it reached one. By the clock a busy machine would make slow what is short, and slower for being slow.
    """
    gave_way, until = False, select.poll()  # `select.select` knows no descriptor beyond 1,023
    until.register(channel, select.POLLIN)
    with suppress(OSError):  # it has ended, which the channel tells
        for seconds, nice in LEVELS:
            while (left := seconds - (used(pid) - began)) > 0:
                if until.poll(1000 * max(left, _LEAST_SECONDS)):
                    return gave_way
            nice += os.getpriority(os.PRIO_PROCESS, 0)
            for thread in map(int, os.listdir(f"/proc/{pid}/task") if sys.platform == "linux" else [pid]):
                os.setpriority(os.PRIO_PROCESS, thread, min(19, max(nice, os.getpriority(os.PRIO_PROCESS, thread))))
            gave_way = True
    return gave_way
