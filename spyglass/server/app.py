"""The HTTP application: routes, and what connects a request to the engine's thread. No protocol is known here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spyglass import __version__
from spyglass.config.keys import read_api_keys
from spyglass.config.server import ServerConfig
from spyglass.engine.adapters import AdapterRegistry
from spyglass.engine.llm import LLM
from spyglass.engine.shares import Client, Places
from spyglass.engine.worker import EngineWorker
from spyglass.errors import ConfigError, NotServedError, OverloadedError
from spyglass.prompt.decode import ImageLimits
from spyglass.server.about import about_routes
from spyglass.server.adapters import AdapterRoutes
from spyglass.server.body import read_body
from spyglass.server.exchange import Call, Endpoint, Immediate, Served
from spyglass.server.keys import RATE_HEADERS, KeyRing, sender_of
from spyglass.server.limits import MAX_READING
from spyglass.server.log import Record
from spyglass.server.log_lines import log_throughput
from spyglass.server.memory import MemoryBudget, Reservation
from spyglass.server.metrics import Metrics
from spyglass.server.middleware import RequestMiddleware
from spyglass.server.openapi import openapi_routes
from spyglass.server.page import page_routes
from spyglass.server.parsing import Parsers
from spyglass.server.pauses import short_pauses
from spyglass.server.protocols.endpoints import make_endpoints
from spyglass.server.readiness import Readiness
from spyglass.server.stream import RequestTimer, send_content, send_events, send_whole
from spyglass.server.workers import Workers

_OLLAMA = "/api/"


class Service:
    """One model behind HTTP: the engine's thread, and what all requests share."""

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        worker: EngineWorker | None = None,
        keys: KeyRing | None = None,
        *,
        own_protocols: bool = False,
    ) -> None:
        self.config = config
        self.keys = keys or KeyRing(read_api_keys(config.api_key, config.api_key_file))
        self.max_live = llm.options.max_sequences + config.max_waiting
        self.worker = worker or EngineWorker(llm.engine, max_live=self.max_live, clients=self.keys.clients)
        served = served_by(llm, config)
        self.workers = Workers(served)
        self.served = replace(served, unpack=self.workers.unpack)
        self.adapters = AdapterRegistry(llm.lora, self.worker)
        self.metrics = Metrics(self.served.names[0], self.worker.stats)
        self.readiness = Readiness(llm, self.worker, lambda: self.stopping, describe(llm, self.served))
        self.parsers = Parsers(
            config,
            served.limits,
            self.max_live,
            llm.engine.prepare,
            None if own_protocols else self.workers,
            served.adapter_names,
        )
        self.stopping = False
        self.ranks = llm.ranks
        self.reading = Places(MAX_READING, self.keys.clients)  # bodies between their first byte and their last
        self.calls = Places(self.max_live, self.keys.clients)  # requests from their bodies to the ends of their answers
        self.held = MemoryBudget(config.max_held_bytes, self.keys.clients)  # bodies until they are parsed, then images
        self.started = int(time.time())

    async def drain(self) -> None:
        """Take nothing new; let streams end within the grace period, then end them."""
        self.stopping = True
        await self.worker.drain(self.config.grace_seconds)

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """Start the engine's thread, find out what works, and in the end stop."""
        with short_pauses():
            self.worker.start()
            work = self.readiness.try_all(), self.readiness.watch(), log_throughput(lambda: self.worker.stats().engine)
            watching = self.metrics.watch_loop()
            tasks = [asyncio.create_task(each) for each in (*work, watching)]
            try:
                yield
            finally:
                self.stopping = True
                for task in tasks:
                    task.cancel()
                self.parsers.shutdown()
                await asyncio.to_thread(self.workers.close)
                await asyncio.to_thread(self.worker.stop)
                if (
                    self.ranks is not None
                ):  # here, as the signal that ends a server ends its process as soon as it is done
                    await asyncio.to_thread(self.ranks.close)


class EndpointRoute:
    """Serves one protocol's path."""

    def __init__(self, service: Service, endpoint: Endpoint) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, parse, run, answer; all of it ends when the client goes away.

        Raises:
            SpyglassError, HTTPException: the request is refused; nothing has been sent.
        """
        service, caller = self._service, scope["caller"]
        client = caller.client
        caller.take(requests=1)
        body, held = Reservation(service.held, client), Reservation(service.held, client)
        if not service.reading.has_room(client):
            raise OverloadedError(f"{service.reading.num_taken} bodies are being read, no more may be; send it later")
        service.reading.take(client)
        try:
            data = await read_body(Request(scope, receive), service.config.max_body_bytes, body)
        finally:
            service.reading.take(client, -1)
        if not service.calls.has_room(client):
            body.release()
            raise OverloadedError(
                f"{service.calls.num_taken} requests are under way, {service.max_live} may be; send it later"
            )
        service.calls.take(client)
        try:
            parsing = service.parsers.parse(self._endpoint, data, body, sender_of(scope, client))
            del data
            answering = asyncio.create_task(self._answer(parsing, held, scope, send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
                else:
                    scope["record"].client_left = True
            finally:
                answering.cancel()
                leaving.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
        finally:
            service.calls.take(client, -1)
            held.release()

    async def _answer(
        self, parsing: asyncio.Future[Call | Immediate], held: Reservation, scope: Scope, send: Send
    ) -> None:
        record: Record = scope["record"]
        call = await parsing
        record.parse_s = time.monotonic() - scope["began"]
        record.ignored = call.ignored
        if isinstance(call, Immediate):
            await send_content(call.status, call.content, send, {})
            return
        record.model, record.stream, record.answers = call.adapter or call.model, call.stream, len(call.params)
        record.images = call.images
        held.take(sum(image.nbytes for image in call.prompts[0].patches))
        timer, caller = RequestTimer(record, scope["began"], call.prompts), scope["caller"]
        longest = _longest(call, self._service.served.max_length)
        caller.take(tokens=longest, images=call.images)
        try:
            await self._run(call, record, timer, caller.client, held, send)
        finally:
            caller.give_back(longest - timer.tokens)

    async def _run(
        self, call: Call, record: Record, timer: RequestTimer, client: Client, held: Reservation, send: Send
    ) -> None:
        with self._service.adapters.used(call.adapter) as adapter:
            submission = self._service.worker.submit(call.requests, adapter, client)
            try:
                if call.stream:
                    await send_events(call, submission, timer, record.request_id, self._endpoint, send)
                else:
                    await send_whole(call, submission, timer, record.request_id, held, send)
            finally:
                self._service.worker.cancel(submission)
                record.malformed_tool_call = call.reply.malformed_tool_call


def create_app(
    llm: LLM,
    config: ServerConfig,
    *,
    worker: EngineWorker | None = None,
    endpoints: Sequence[Endpoint] | None = None,
    keys: KeyRing | None = None,
) -> Starlette:
    """The application that serves a model; `app.state.service` is its `Service`. Tests pass parts of their own.

    The engine of `llm` belongs to the application's thread while it runs: `LLM` itself must not be asked meanwhile.
    """
    service = Service(llm, config, worker, keys, own_protocols=endpoints is not None)
    protocols = make_endpoints(service.served) if endpoints is None else endpoints
    by_path = {endpoint.path: endpoint for endpoint in protocols}
    routes = [Route(path, EndpointRoute(service, endpoint), methods=["POST"]) for path, endpoint in by_path.items()]
    routes += [
        Route("/health", partial(_health, service)),
        Route("/metrics", partial(_metrics, service)),
        Route("/v1/models", partial(_models, service)),
        Route("/v1/models/{name:path}", partial(_model, service)),
        *page_routes(service.served),
        *about_routes(llm, service.served, service.started),
        *openapi_routes(protocols),
        *_adapter_routes(llm, service),
    ]
    gate = Middleware(
        RequestMiddleware,
        keys=service.keys,
        endpoint_of=partial(_endpoint_of, by_path),
        metrics=service.metrics,
        stopping=lambda: service.stopping,
        root_path=config.root_path,
    )
    app = Starlette(
        routes=routes,
        middleware=[*_cors(config), gate],
        exception_handlers={HTTPException: _pass_on},
        lifespan=service.life,
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _adapter_routes(llm: LLM, service: Service) -> list[Route]:
    """The paths that load and unload adapters, if that is allowed."""
    if not service.config.allow_adapter_loading:
        return []
    root, reserved = Path(service.config.adapter_root), service.served.names
    desk, readiness = service.adapters, service.readiness
    return AdapterRoutes(llm, desk, readiness, service.held, root=root, reserved=reserved).routes()


def served_by(llm: LLM, config: ServerConfig) -> Served:
    """What protocols must know of a model.

    Raises:
        ConfigError: an adapter has a name of the model's.
    """
    names = config.model_name or (llm.name,)
    for name in set(names) & set(llm.adapters):
        raise ConfigError(f"{name!r} is both the model and an adapter; give one of them another name")
    limits = ImageLimits(
        file_bytes=config.max_image_bytes,
        total_bytes=config.max_total_image_bytes,
        side=config.max_image_side,
        total_pixels=config.max_image_pixels,
        images=llm.options.images or ImageLimits().images,
    )
    return Served(
        names=names,
        config=llm.config,
        tokenizer=llm.tokenizer,
        limits=limits,
        max_length=llm.engine.max_length,
        adapter_names=lambda: llm.adapters,
        without_vision=config.without_vision,
        strict_fields=config.strict_fields,
        vision=llm.loaded.model.vision_state,
    )


def describe(llm: LLM, served: Served) -> dict[str, Any]:
    """What `/health` says about the model."""
    loaded = llm.loaded
    return {
        "model": served.names[0],
        "version": __version__,
        "family": llm.config.family,
        "device": str(loaded.device),
        "tensor_parallel_size": llm.options.tensor_parallel_size,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "numerics": loaded.numerics,
        "max_length": served.max_length,
        "vision": served.vision,
        "ops": dict(loaded.model.options.build.ops.chosen),
        "numbers": "not compared" if llm.numbers is None else llm.numbers.as_json(),
    }


def _longest(call: Call, max_length: int) -> int:
    """Tokens that a call may come to: each prompt once, and every answer as long as it may be."""
    prompts = {id(prompt): len(prompt) for prompt in call.prompts}
    each = zip(call.prompts, call.params, strict=True)
    rooms = ((max_length - len(prompt), params.max_tokens) for prompt, params in each)
    return sum(prompts.values()) + sum(room if most is None else min(most, room) for room, most in rooms)


async def _left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_on(request: Request, error: Exception) -> Response:
    """Leave the wording to the gate; the router's own has no path and no advice."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        raise HTTPException(404, f"there is nothing at {where}; GET /docs lists what there is", error.headers)
    if error.status_code == 405:
        raise HTTPException(405, f"{where} is not allowed; see the allow header", error.headers)
    raise error


async def _health(service: Service, request: Request) -> Response:
    status, body = service.readiness.report()
    return JSONResponse(body, status)


async def _metrics(service: Service, request: Request) -> Response:
    return Response(
        await asyncio.to_thread(service.metrics.text), media_type="text/plain; version=0.0.4; charset=utf-8"
    )


async def _models(service: Service, request: Request) -> Response:
    names = _names(service)
    pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # for Anthropic's clients
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in names], **pages})


async def _model(service: Service, request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _names(service):
        raise NotServedError(f"model {name!r} is not served here; served are {', '.join(_names(service))}")
    return JSONResponse(_card(service, name))


def _names(service: Service) -> tuple[str, ...]:
    return service.served.names + service.served.adapters


def _card(service: Service, name: str) -> Mapping[str, Any]:
    """A model for both kinds of clients: what OpenAI's and Anthropic's lists hold."""
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.started))
    return {
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "spyglass",
        "type": "model",
        "display_name": name,
        "created_at": created,
        "max_model_len": service.served.max_length,
        "vision": service.served.vision,
        "parent": service.served.names[0] if name in service.served.adapters else None,
    }


def _endpoint_of(by_path: Mapping[str, Endpoint], path: str) -> Endpoint | None:
    """The protocol whose errors a path's clients understand: its own, or that of the longest path before it; all of
    `/api/` is Ollama's."""
    known = [route for route in by_path if path == route or path.startswith(route + "/")]
    if path.startswith(_OLLAMA):
        known = known or [route for route in by_path if route.startswith(_OLLAMA)]
    return by_path[max(known, key=len)] if known else None


def _cors(config: ServerConfig) -> list[Middleware]:
    if not config.cors_origin:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-spyglass-ignored", *RATE_HEADERS],
        )
    ]
