"""Whose work is begun next, where several clients want more than there are threads or processes for."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TypeVar

from spyglass.engine.shares import Client

_R = TypeVar("_R")


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
        """Wait for a turn."""
        come = threading.Event()
        self._queue(client, come.set)
        come.wait()

    def give_back(self, client: Client) -> None:
        """A turn is over."""
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
