"""A protocol of the tests' own, the least there can be, and a server of it on a thread with a real port."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import uvicorn
from PIL import Image
from starlette.applications import Starlette

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import Delta, RequestOutput, SamplingParams
from spyglass.errors import NotServedError, PromptError
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.chat import ImageRef
from spyglass.prompt.data_url import is_data_url
from spyglass.server.app import served_by
from spyglass.server.exchange import Call, Fetch, Immediate, Served
from spyglass.server.protocols.fields import Fields
from spyglass.server.run import bind, bind_unix, make_server, serve
from spyglass.server.tls import Certificate

NO_FIELDS = Fields(read=frozenset())


@dataclass
class PlainReply:
    """Events hold what a delta holds; the whole body holds every answer's ids."""

    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    malformed_tool_call: bool = False

    def begin(self, request_id: str) -> bytes:
        return event({"id": request_id})

    def push(self, index: int, delta: Delta) -> bytes:
        if delta.output is not None:
            self.outputs[index] = delta.output
        error = None if delta.output is None else delta.output.error
        told = {"index": index, "ids": list(delta.token_ids), "text": delta.text}
        return event({**told, "finish": delta.finish_reason, "error": error})

    def end(self) -> bytes:
        return event({"done": True})

    def whole(self, request_id: str) -> tuple[int, Mapping[str, Any]]:
        outputs = [self.outputs[index] for index in sorted(self.outputs)]
        errors = [output.error for output in outputs if output.error is not None]
        body = {"id": request_id, "answers": [list(output.token_ids) for output in outputs], "errors": errors}
        return 500 if errors else 200, body


@dataclass
class PlainEndpoint:
    """`{"ids", "image", "max_tokens", "n", "stream", "model"}`; `{"count": true}` only counts."""

    served: Served
    path: str = "/plain"
    fields: Fields = NO_FIELDS

    def parse(self, body: Mapping[str, Any], fetch: Fetch | None) -> Call | Immediate:
        model = body.get("model", self.served.names[0])
        if model not in self.served.names + self.served.adapters:
            raise NotServedError(f"model {model!r} is not served here")
        ids = body.get("ids", [0, 5, 6])
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise PromptError("ids must be a list of integers")
        parts: list[Any] = [ids]
        for image in map(str, body.get("images", [])):
            if image.startswith("http") and fetch is not None:
                parts.append(ImageRef(fetch(image), "images"))
            elif is_data_url(image):
                parts.append(ImageRef(image, "images"))
            else:
                raise PromptError("images must be data URLs")
        prompt = prompt_from_parts(parts, self.served.config, limits=self.served.limits)
        if body.get("count"):
            return Immediate(body={"tokens": len(prompt)})
        params = SamplingParams(
            temperature=body.get("temperature", 0), max_tokens=body.get("max_tokens", 4), ignore_eos=True, seed=0
        )
        return Call(
            model=self.served.names[0],
            prompts=[prompt] * body.get("n", 1),
            params=[params] * body.get("n", 1),
            stream=body.get("stream", False),
            reply=PlainReply(malformed_tool_call=body.get("odd", False)),
            adapter=model if model in self.served.adapters else None,
            images=len(parts) - 1,
            ignored=tuple(name for name in ("user",) if name in body),
        )

    def error(self, status: int, message: str, **more: str | None) -> Mapping[str, Any]:
        return {"plain_error": {"status": status, "message": message}}


def data_url(picture: Image.Image | None = None) -> str:
    """A picture as PNG in a data URL; a small grey one if none is given."""
    out = io.BytesIO()
    (picture or Image.new("RGB", (40, 30), "grey")).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; comments are no events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def ids_of(stream: Sequence[Mapping[str, Any]], index: int = 0) -> list[int]:
    """The tokens of one answer of a stream."""
    return [token for item in stream if item.get("index") == index for token in item["ids"]]


@dataclass
class Live:
    """A server that listens. `client` is patient; `service` its inside."""

    url: str
    app: Starlette
    server: uvicorn.Server
    client: httpx.Client
    client_errors: tuple[type[Exception], ...] = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

    @property
    def service(self) -> Any:
        return self.app.state.service

    def post(self, body: Any, path: str = "/plain", **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def wait_until_idle(self) -> None:
        """Until nothing is under way."""
        wait_for(lambda: not self.service.worker.stats().live and not self.service.calls.num_taken)


@contextmanager
def running(
    app: Starlette,
    *,
    ready: bool = True,
    header_s: float = 30.0,
    uds: str | None = None,
    certificate: Certificate | None = None,
) -> Iterator[Live]:
    """Serve an application on a thread until the block ends; with a certificate by https, which the client trusts."""
    server = make_server(app, app.state.service.config.grace_seconds, header_s=header_s, certificate=certificate)
    listening = bind("127.0.0.1", 0) if uds is None else bind_unix(uds)
    url = (
        f"{'http' if certificate is None else 'https'}://127.0.0.1:{listening.getsockname()[1]}"
        if uds is None
        else "http://here"
    )
    thread = threading.Thread(target=lambda: asyncio.run(serve(server, app, listening)), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    transport = None if uds is None else httpx.HTTPTransport(uds=uds)
    with httpx.Client(base_url=url, timeout=180, transport=transport, verify=certificate is None) as client:
        live = Live(url, app, server, client)
        if ready:
            wait_for(lambda: live.service.readiness.report()[1]["status"] != "starting")
        try:
            yield live
        finally:
            server.should_exit = True
            thread.join(120)
            assert not thread.is_alive(), "the server did not stop"


def wait_for(fact: Any) -> None:
    """Until `fact()` is true; minutes are no rule, they end a test that would never end."""
    until = time.monotonic() + 120
    while not fact():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def plain(llm: LLM, config: ServerConfig | None = None) -> Any:
    """The tests' endpoint for a model, with the limits of a server (a default one)."""
    return PlainEndpoint(served_by(llm, config or ServerConfig()))
