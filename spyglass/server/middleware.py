"""What every request passes: its id, the key, the one place where errors become bodies, the log and the numbers."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spyglass.errors import is_recoverable
from spyglass.server.errors import error_body, error_response
from spyglass.server.exchange import Endpoint
from spyglass.server.keys import KeyRing
from spyglass.server.log import REQUESTS, Record, log_request
from spyglass.server.metrics import Metrics
from spyglass.server.stream import send_json

OPEN_PATHS = ("/", "/playground/plan", "/docs", "/openapi.json", "/health")  # pages and the probe work without a key
_HEADER_BYTES = 2000
_LEFT = 499  # what logs and numbers say of a client that did not wait for an answer
_GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class RequestMiddleware:
    """Wraps the routes. `endpoint_of` finds the protocol of a path; `stopping` says that nothing new is taken.
    Below `root_path` everything is found as at the root."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        endpoint_of: Callable[[str], Endpoint | None],
        metrics: Metrics,
        stopping: Callable[[], bool],
        root_path: str = "",
    ) -> None:
        self._app, self._root_path, self._keys = app, root_path, keys
        self._endpoint_of, self._metrics, self._stopping = endpoint_of, metrics, stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        if self._root_path and (scope["path"] + "/").startswith(self._root_path + "/"):  # a proxy that left it there
            scope["path"] = scope["path"].removeprefix(self._root_path) or "/"
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        record = Record(request_id=request_id, method=scope["method"], path=scope["path"])
        scope["record"], scope["began"] = record, began

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                name = request_id.encode()
                ids = (b"x-request-id", name), (b"request-id", name)
                message["headers"] = [*message["headers"], *ids, *scope["caller"].headers()]
                if record.ignored:
                    message["headers"] = [*message["headers"], (b"x-spyglass-ignored", _header(record.ignored))]
            await send(message)

        scope["caller"] = self._keys.nobody
        try:
            self._check(headers, scope, record)
            await self._app(scope, receive, send_named)
        except ClientDisconnect:
            record.client_left = True
        except BaseException as error:
            if record.status or not is_recoverable(error):  # too late for a body: a stream has its own way to tell
                raise
            await self._refuse(error, record, send_named)
        finally:
            record.status = record.status or _LEFT
            record.total_s = time.monotonic() - began
            self._metrics.count(record, self._route(scope))
            log_request(record)

    def _check(self, headers: Headers, scope: Scope, record: Record) -> None:
        """Find out who calls. Raises HTTPException: two lengths (RFC 9112 6.1), no key, or no time left."""
        if "transfer-encoding" in headers and "content-length" in headers:  # a proxy before us may have read the other
            advice = "a body has a content-length or a transfer-encoding, not both; send one"
            raise HTTPException(400, advice, {"connection": "close"})
        caller = self._keys.find(headers)
        if caller is not None:
            scope["caller"], record.key = caller, caller.name
        elif scope["path"] not in OPEN_PATHS:
            advice = "send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            raise HTTPException(401, f"the API key is missing or wrong; {advice}", {"www-authenticate": "Bearer"})
        if self._stopping() and scope["path"] not in OPEN_PATHS:
            raise HTTPException(503, "the server is shutting down; send the request again", {"retry-after": "5"})

    async def _refuse(self, error: BaseException, record: Record, send: Send) -> None:
        response = error_response(error)
        if not response.known:
            REQUESTS.error("request %s failed", record.request_id, exc_info=error)
        record.error = type(error).__name__  # no more: a message may quote what the client sent
        body = error_body(self._endpoint_of(record.path), response)
        headers = {name: value for name, value in response.headers.items() if not name.lower().startswith("content-")}
        await send_json(response.status, body, send, headers)

    def _route(self, scope: Scope) -> str:
        """The path if a route took it: strangers may not make up names for numbers."""
        return scope["path"] if "endpoint" in scope and not scope.get("path_params") else "other"


def _header(places: Sequence[str]) -> bytes:
    """Places of a request as a header may have them: printable, in one line, not too long."""
    text = ", ".join(places).encode("ascii", "backslashreplace")[:_HEADER_BYTES]
    return bytes(byte if 32 <= byte < 127 else 63 for byte in text)
