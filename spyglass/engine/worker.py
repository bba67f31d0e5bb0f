"""One thread that owns an engine. Calls come from an event loop, what each step brings goes back to it.

The thread never waits for a reader: outputs are enqueued for their event loop and the next step begins. A reader that
is late finds them merged. A step that fails ends the requests of that step; the thread goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from spyglass.engine.request import SHUTTING_DOWN, Delta
from spyglass.engine.sequence import Request
from spyglass.engine.shares import ANYBODY, Client, Places
from spyglass.engine.stats import EngineStats
from spyglass.errors import CapacityError, OverloadedError, RankError, SpyglassError, is_recoverable
from spyglass.lora.use import NO_ADAPTER, AdapterHandle

_GIVE_UP_AFTER = 3  # steps in a row that raise and bring nothing: then everything under way is ended
_POLL_S = 0.02
_LOG = logging.getLogger(__name__)


class EngineParts(Protocol):
    """What the thread drives: an `Engine`, or in tests anything that answers like one."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def submit(self, request: Request, *, adapter: AdapterHandle = NO_ADAPTER, client: Client = ANYBODY) -> int:
        """Queue a prepared request; returns its id."""

    def step(self, deliver: Callable[[list[Delta]], object] | None = None) -> list[Delta]:
        """Run one step."""

    def abort(self, request_id: int) -> Delta | None:
        """End a request now."""

    def stats(self) -> EngineStats:
        """What it counts."""


class ResponseStream:
    """The answers of one call as they come. Belongs to the event loop that made it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: int, client: Client) -> None:
        self.loop, self.client = loop, client
        self.requests: list[int] = []  # the thread's: ids of answers that have not ended
        self._open = answers
        self._decided = False
        self._error: Exception | None = None
        self._deltas: list[tuple[int, Delta]] = []
        self._arrived = asyncio.Event()

    async def accepted(self) -> None:
        """Returns when the engine has taken the call.

        Raises:
            PromptError, CapacityError: it was refused, as `Engine.add`.
        """
        while not self._decided:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def deltas(self) -> list[tuple[int, Delta]]:
        """What has come since the last call: (number of the answer, delta), one for each; empty after the last.

        Raises:
            SpyglassError: the engine's thread has ended.
        """
        while not self._deltas and self._open:
            if self._error is not None:
                raise self._error
            await self._wait()
        deltas, self._deltas = self._deltas, []
        self._open -= sum(delta.finish_reason is not None for _, delta in deltas)
        return deltas if len(deltas) < 2 else _merge(deltas)

    def decide(self, error: Exception | None) -> None:
        """Called in the event loop: accepted, or refused with `error`."""
        self._decided, self._error = True, error
        self._arrived.set()

    def receive(self, index: int, delta: Delta) -> None:
        """Called in the event loop: what a step brought for one answer."""
        self._deltas.append((index, delta))
        self._arrived.set()

    async def _wait(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """The state of the thread. `live` answers are queued or running; `step_s` is how long the present step has run.

    `failed_steps` counts steps that raised since the start; `failing` says that the last ones did, with none between
    them that worked. `engine` is what the engine itself counts, read while it may be at work.
    """

    live: int
    engine: EngineStats
    failed_steps: int
    failing: bool
    step_s: float


class EngineWorker:
    """Runs an engine in a thread of its own. Answers beyond `max_live` are refused until others end; where there are
    several `clients`, no one of them can take all of these places (`Places`)."""

    def __init__(self, engine: EngineParts, *, max_live: int, clients: Sequence[Client] = ()) -> None:
        self._engine, self._places = engine, Places(max_live, clients)
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._accepting, self._running = True, True
        self._streams: dict[int, tuple[ResponseStream, int]] = {}
        self._failed_steps = self._failures = 0
        self._ending = "the engine has stopped"
        self._began: float | None = None
        self._pace_s = 1.0  # between the ends of two answers, lately
        self._last_end = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(
        self, requests: Sequence[Request], adapter: AdapterHandle = NO_ADAPTER, client: Client = ANYBODY
    ) -> ResponseStream:
        """Queue one call, an answer for each of `requests`. Called in the event loop that will read the answers.

        Raises:
            OverloadedError: as many answers as may be are queued or running.
            CapacityError: the call wants more answers than may ever be.
        """
        stream = ResponseStream(asyncio.get_running_loop(), len(requests), client)
        with self._changed:
            self._require_capacity(len(requests), client)
            self._places.take(client, len(requests))
            self._command(partial(self._admit, stream, requests, adapter))
        return stream

    def cancel(self, stream: ResponseStream) -> None:
        """End what is left of a call, within one step; it brings nothing more. Any thread, any number of times."""
        with self._changed:
            self._command(partial(self._end, stream))

    async def between_steps(self, work: Callable[[], None]) -> None:
        """Run something in the engine's thread while no step runs. What it raises is raised here."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def command() -> None:
            try:
                work()
            except Exception as error:
                self._call(loop, partial(done.set_exception, error))
            else:
                self._call(loop, partial(done.set_result, None))

        with self._changed:
            self._command(command)
        await done

    def stats(self) -> WorkerStats:
        """How the thread is doing. Any thread."""
        began = self._began
        return WorkerStats(
            live=self._places.num_taken,
            engine=self._engine.stats(),
            failed_steps=self._failed_steps,
            failing=self._failures >= _GIVE_UP_AFTER,
            step_s=0.0 if began is None else time.monotonic() - began,
        )

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let answers end for `grace_s` seconds, then end the rest with an error that says so."""
        self._accepting = False
        until = time.monotonic() + grace_s
        while self._places.num_taken and self._running and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        with self._changed:
            self._command(partial(self._end_all, SHUTTING_DOWN))

    def stop(self, wait_s: float = 5.0) -> None:
        """End the thread after the step it is in; returns after `wait_s` seconds at the latest."""
        with self._changed:
            self._accepting = self._running = False
            self._changed.notify()
        self._thread.join(wait_s)

    def _require_capacity(self, answers: int, client: Client) -> None:
        if answers > (most := self._places.most_of(client)):
            raise CapacityError(f"the request wants {answers} answers, {most} may be under way; ask for fewer")
        if not self._accepting:
            raise OverloadedError("the server is shutting down; send the request to another one", 5.0)
        if not self._places.has_room(client, answers):
            raise OverloadedError(
                f"{self._places.num_taken} answers are under way and waiting, {self._places.most} may be; "
                "send it again later",
                max(1.0, self._pace_s * answers),
            )

    def _command(self, command: Callable[[], None]) -> None:
        """Have the thread do something before its next step; with the lock held."""
        self._commands.append(command)
        self._changed.notify()

    def _run(self) -> None:
        try:
            while self._running:
                with self._changed:
                    while self._running and not self._commands and not self._engine.has_work:
                        self._changed.wait()
                    commands, self._commands = self._commands, []
                for command in commands:
                    command()
                if self._running and self._engine.has_work:
                    self._step()
        except RankError as error:
            self._failures, self._ending = _GIVE_UP_AFTER, str(error)
            self._end_all(self._ending)
        except Exception:
            _LOG.exception("the engine's thread has ended")
            self._failures = _GIVE_UP_AFTER
        finally:
            self._close()

    def _close(self) -> None:
        """Nobody may wait for a thread that is no more."""
        with self._changed:
            self._accepting = self._running = False
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        error = SpyglassError(f"{self._ending}; start the server again")
        for stream, _ in self._streams.values():
            self._call(stream.loop, partial(stream.decide, error))

    def _step(self) -> None:
        self._began = time.monotonic()
        try:
            deltas = self._engine.step(self._deliver_early)
        except BaseException as error:
            if isinstance(error, RankError) or not is_recoverable(error):  # after the first there is no other step
                raise
            _LOG.exception("a step failed; its requests are over, the others go on")
            self._failed_steps += 1
            self._failures += 1
            if self._failures % _GIVE_UP_AFTER == 0:
                self._end_all("the engine failed")
        else:
            self._deliver(deltas)
        finally:
            self._began = None

    def _deliver_early(self, deltas: Sequence[Delta]) -> None:
        """What came between the layers of a step, which therefore does not hang."""
        self._began = time.monotonic()
        self._deliver(deltas)

    def _admit(self, stream: ResponseStream, requests: Sequence[Request], adapter: AdapterHandle) -> None:
        refusal: Exception | None = None
        try:
            for index, request in enumerate(requests):
                request_id = self._engine.submit(request, adapter=adapter, client=stream.client)
                stream.requests.append(request_id)
                self._streams[request_id] = stream, index
        except Exception as error:  # any error goes to the client, so that no call waits for ever
            refusal = error
            self._forget(stream, len(requests) - len(stream.requests))
            self._end(stream)
        self._call(stream.loop, partial(stream.decide, refusal))

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        """Enqueue deltas for their event loops: one call for each loop, however many requests ran."""
        if any(delta.output is None or delta.output.error is None for delta in deltas):
            self._failures = 0
        outputs: dict[asyncio.AbstractEventLoop, list[tuple[ResponseStream, int, Delta]]] = {}
        for delta in deltas:
            entry = self._streams.get(delta.request_id)
            if entry is None:
                continue
            stream, index = entry
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
                stream.requests.remove(delta.request_id)
                self._forget(stream, 1)
            outputs.setdefault(stream.loop, []).append((stream, index, delta))
        for loop, items in outputs.items():
            if not self._call(loop, partial(_hand_over, items)):
                with self._changed:  # a step may be under way, so the engine is not asked now
                    self._commands += [partial(self._end, stream) for stream, _, _ in items]

    def _end(self, stream: ResponseStream) -> None:
        """Abort what is left of a call; nothing of it is delivered."""
        for request in stream.requests:
            self._engine.abort(request)
            del self._streams[request]
        self._forget(stream, len(stream.requests))
        stream.requests.clear()

    def _end_all(self, why: str) -> None:
        """End everything under way with an error that is delivered."""
        deltas = [self._engine.abort(request) for request in list(self._streams)]
        self._deliver([_with_error(delta, why) for delta in deltas if delta is not None])

    def _forget(self, stream: ResponseStream, answers: int) -> None:
        """So many answers of a call have ended."""
        if not answers:
            return
        now = time.monotonic()
        self._pace_s += 0.2 * (min((now - self._last_end) / answers, 30.0) - self._pace_s)
        self._last_end = now
        with self._changed:
            self._places.take(stream.client, -answers)

    def _call(self, loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> bool:
        """Have an event loop do something; whether it still runs."""
        try:
            loop.call_soon_threadsafe(work)
        except RuntimeError:  # closed
            return False
        return True


def _hand_over(items: Sequence[tuple[ResponseStream, int, Delta]]) -> None:
    for stream, index, delta in items:
        stream.receive(index, delta)


def _merge(deltas: Sequence[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    """One delta for each answer, with everything that came for it."""
    found: dict[int, list[Delta]] = {}
    for index, delta in deltas:
        found.setdefault(index, []).append(delta)
    return [(index, deltas[0] if len(deltas) == 1 else _joined(deltas)) for index, deltas in found.items()]


def _joined(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for entries in logprobs for entry in entries) if logprobs else None,
    )


def _with_error(delta: Delta, why: str) -> Delta:
    assert delta.output is not None
    return replace(delta, output=replace(delta.output, error=why))
