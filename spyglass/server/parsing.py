"""Threads that make calls of bodies: reading JSON, unpacking images, fetching those that lie elsewhere.

A body that is not small is read in another process (`workers`), which ends with its client; small ones are read here,
and wait for no large one. Few unpack at once, since each may take hundreds of megabytes. A request whose images must be
fetched goes to threads of its own, as many as there may be requests, and gives its turn among those that unpack away
while it waits for other people's servers: so a slow one delays nobody but the request that named it. What has been
fetched counts as held. Grammars, which may take a second to compile, have threads of their own too. One client's costly
bodies and grammars are not before another's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

from spyglass.config.server import ServerConfig
from spyglass.engine.request import SamplingParams, Structured
from spyglass.engine.sequence import Request
from spyglass.engine.shares import ANYBODY, Client, Turns
from spyglass.errors import PromptError, SpyglassError
from spyglass.machine import usable_cores
from spyglass.prompt.decode import ImageLimits
from spyglass.prompt.tokens import Prompt
from spyglass.server.body import parse_json
from spyglass.server.exchange import Call, Endpoint, Fetch, Immediate
from spyglass.server.fetch import RemoteImages
from spyglass.server.limits import SMALL_BODY
from spyglass.server.memory import Reservation
from spyglass.server.passing import Wanted
from spyglass.server.protocols.fields import RequestError
from spyglass.server.protocols.tool_grammar import with_definitions
from spyglass.server.workers import Job, Workers
from spyglass.server.writing import encoded

_AT_ONCE = 4  # small bodies, large ones and grammars of one client, of each; but no more than cores and one
_NAMING_SECONDS = 0.5  # to find which of thousands of parameters is at fault
Prepare = Callable[[Prompt, SamplingParams], Request]


Remote = Mapping[str, bytes | SpyglassError]  # what was fetched of an address


class _RemoteImageError(Exception):
    """A request has images that must be fetched: those of `addresses`, if they are known already."""

    def __init__(self, addresses: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.addresses = addresses


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a thread has that reads a body for a client."""

    turns: Turns
    client: Client


class Parsers:
    """Parses for at most `most` requests at a time. `prepare` is the engine's; without `workers` all bodies are read
    here. `adapters` tells the names that are served now."""

    def __init__(
        self,
        config: ServerConfig,
        limits: ImageLimits,
        most: int,
        prepare: Prepare,
        workers: Workers | None,
        adapters: Callable[[], tuple[str, ...]],
    ) -> None:
        self._limits, self._prepare, self._workers, self._adapters = limits, prepare, workers, adapters
        self._seconds = config.fetch_seconds if config.remote_images else None
        self.at_once = at_once = min(_AT_ONCE, 1 + usable_cores().threads)
        self._small, self._large, self._grammars = Turns(at_once), Turns(at_once), Turns(at_once)
        self._pool = ThreadPoolExecutor(4 * at_once, thread_name_prefix="parse")
        self._compilers = ThreadPoolExecutor(2 * at_once, thread_name_prefix="form")
        self._fetchers = ThreadPoolExecutor(most, thread_name_prefix="fetch")

    def parse(
        self, endpoint: Endpoint, body: bytes, held: Reservation, client: Client = ANYBODY
    ) -> asyncio.Future[Call | Immediate]:
        """The call of a body, or its refusal. `held` is given back when no thread needs the body, waited for or not."""
        parsing: Future[Call | Immediate] = Future()
        job = Job()
        turns = self._small if len(body) <= SMALL_BODY else self._large
        parsing.add_done_callback(lambda _: held.release())

        def begin() -> Call | Immediate | None:
            if not parsing.set_running_or_notify_cancel():
                return None  # its client has left
            return self._parse(endpoint, body, job, None if self._seconds is None else _refuse_remote, {})

        def prepare(call: Call) -> Call:
            return call if parsing.cancelled() else prepared(call, self._prepare)

        def pass_on(work: Future[Any], *, done: bool = False) -> None:
            if parsing.cancelled() or work.cancelled():
                return
            error = work.exception()
            if isinstance(error, _RemoteImageError):
                fetch = partial(self._fetch_and_parse, endpoint, body, job, held, error.addresses, _Turn(turns, client))
                self._fetchers.submit(fetch).add_done_callback(pass_on)
            elif error is not None:  # a library that panics raises what is no Exception
                parsing.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)[:200]))
            elif not done and needs_grammar(work.result()):
                preparing = self._grammars.submit(client, self._compilers, partial(prepare, work.result()))
                preparing.add_done_callback(partial(pass_on, done=True))
            else:
                parsing.set_result(work.result())

        turns.submit(client, self._pool, begin).add_done_callback(pass_on)
        waiting = asyncio.wrap_future(parsing)
        waiting.add_done_callback(lambda done: job.end() if done.cancelled() else None)
        return waiting

    def shutdown(self) -> None:
        for pool in (self._pool, self._fetchers, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _parse(
        self, endpoint: Endpoint, body: bytes, job: Job, fetch: Fetch | None, remote: Remote
    ) -> Call | Immediate:
        call: Call | Immediate | Wanted
        if self._workers is None or len(body) <= SMALL_BODY:
            call = encoded(endpoint.parse(parse_json(body), fetch))
        else:
            known = None if self._seconds is None else remote
            call = self._workers.read(endpoint.path, body, self._adapters(), known, job)
        if isinstance(call, Wanted):
            raise _RemoteImageError(call.addresses)
        return prepared(call, self._prepare) if isinstance(call, Call) and not needs_grammar(call) else call

    def _fetch_and_parse(
        self, endpoint: Endpoint, body: bytes, job: Job, held: Reservation, addresses: tuple[str, ...], turn: _Turn
    ) -> Call | Immediate:
        """Parse, fetching the images of this one request; while it waits, others may unpack theirs."""
        assert self._seconds is not None
        images = RemoteImages(seconds=self._seconds, limits=self._limits, count=held.take)
        remote: dict[str, bytes | SpyglassError] = {}
        for address in addresses:
            try:
                remote[address] = images(address)
            except SpyglassError as error:
                remote[address] = error
        with turn.turns.of(turn.client):
            return self._parse(endpoint, body, job, partial(_fetch_outside, turn, images), remote)


def needs_grammar(call: Call | Immediate) -> TypeGuard[Call]:
    """Whether the answers to a call follow a grammar, which takes time to compile."""
    return isinstance(call, Call) and call.params[0].structured is not None


def prepared(call: Call, prepare: Prepare) -> Call:
    """The call with its requests checked and their grammar compiled, outside the engine's thread.

    Raises:
        PromptError, CapacityError: as `Engine.prepare`.
    """
    requests: list[Request] = []
    for prompt, params in zip(call.prompts, call.params, strict=True):
        if requests and requests[-1].prompt is prompt:  # answers to one prompt differ in their seeds alone
            requests.append(replace(requests[-1], params=params))
        else:
            try:
                requests.append(prepare(prompt, params))
            except PromptError as error:
                raise _at_its_tool(error, call, prepare) from error
    return replace(call, requests=requests)


def _at_its_tool(error: PromptError, call: Call, prepare: Prepare) -> PromptError:
    """The error, or that of the first parameter of a tool that alone makes no grammar, with its place, if that is found
    soon."""
    params, until = call.params[0], time.monotonic() + _NAMING_SECONDS
    if params.structured is None or params.structured.kind != "grammar":
        return error
    for name, schema in call.tools.items():
        for key, inner in schema.get("properties", {}).items():
            if time.monotonic() > until:
                return error
            alone = Structured(kind="json_schema", value=with_definitions(inner, schema))
            try:
                prepare(call.prompt, replace(params, structured=alone))
            except PromptError as fault:
                return RequestError(f"parameter {key!r} of tool {name!r} cannot be called for: {fault}", field="tools")
    return error


def _refuse_remote(address: str) -> bytes:
    raise _RemoteImageError


def _fetch_outside(turn: _Turn, images: RemoteImages, address: str) -> bytes:
    turn.turns.give_back(turn.client)
    try:
        return images(address)
    finally:
        turn.turns.take(turn.client)
