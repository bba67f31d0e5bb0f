"""One call on its way through the engine: its deltas as events while they come, or as one body in the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Send

from spyglass.engine.request import Delta
from spyglass.engine.worker import ResponseStream
from spyglass.errors import is_recoverable
from spyglass.prompt.tokens import Prompt
from spyglass.server.errors import error_body, error_response
from spyglass.server.exchange import Call, Endpoint
from spyglass.server.log import Record
from spyglass.server.memory import Reservation
from spyglass.server.writing import json_bytes

QUIET_S = 15.0  # a stream that is silent for longer says that it lives, so that no proxy closes it
_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_LOG = logging.getLogger(__name__)


class RequestTimer:
    """Notes in the log's record what comes of a call; `began` is when its request came, by `time.monotonic`.

    `prompts` one per answer; one that has several answers counts once. `heard` is when deltas last came.
    """

    def __init__(self, record: Record, began: float, prompts: Sequence[Prompt]) -> None:
        self._record, self._began, self._prompts = record, began, prompts
        self._cached: dict[int, int] = {}  # tokens of each prompt that has an answer
        self._drawn, self.heard = 0, 0.0

    def see(self, mail: Sequence[tuple[int, Delta]]) -> None:
        record, self.heard = self._record, time.monotonic()
        if record.first_token_s is None and any(delta.token_ids for _, delta in mail):
            record.first_token_s = self.heard - self._began
        for index, delta in mail:
            self._drawn += len(delta.token_ids)
            if delta.output is not None:
                usage, prompt = delta.output.usage, id(self._prompts[index])
                if prompt not in self._cached:
                    record.prompt_tokens += usage.prompt_tokens
                    record.image_tokens += usage.image_tokens
                self._cached[prompt] = max(self._cached.get(prompt, 0), usage.cached_tokens)
                record.cached_tokens = sum(self._cached.values())
                record.completion_tokens += usage.completion_tokens
                record.finish += (delta.output.finish_reason,)
                record.error = delta.output.error or record.error

    @property
    def tokens(self) -> int:
        """Tokens of the prompts and of what has been drawn, also for a client that left."""
        return sum({id(prompt): len(prompt) for prompt in self._prompts}.values()) + self._drawn


async def send_whole(
    call: Call, responses: ResponseStream, timer: RequestTimer, request_id: str, held: Reservation, send: Send
) -> None:
    """Wait for every answer, then send one JSON body, which `held` counts until it is read.

    Raises:
        PromptError, CapacityError: the engine refuses the call; nothing has been sent.
        OverloadedError: what others hold leaves no room for the answers.
    """
    await responses.accepted()
    while mail := await responses.deltas():
        timer.see(mail)
        for index, delta in mail:
            call.reply.push(index, delta)

    def make() -> tuple[int, bytes]:
        status, body = call.reply.whole(request_id)
        return status, json_bytes(body)

    status, content = await asyncio.to_thread(make)  # other streams go on meanwhile
    held.take(len(content))
    await send_content(status, content, send, {"retry-after": "5"} if status == 503 else {})


async def send_events(
    call: Call, submission: ResponseStream, timer: RequestTimer, request_id: str, endpoint: Endpoint, send: Send
) -> None:
    """Send events as deltas come. What goes wrong after the first byte becomes an error event.

    Raises:
        PromptError, CapacityError: the engine refuses the call; nothing has been sent.
    """
    await submission.accepted()
    first = call.reply.begin(request_id)
    kind = (b"content-type", call.form.media_type.encode())
    await send({"type": "http.response.start", "status": 200, "headers": [kind, *_UNBUFFERED]})
    alive = asyncio.create_task(_fill_silence(timer, call.form.alive, send))
    try:
        await _send_body(first, send)
        while mail := await submission.deltas():
            timer.see(mail)
            await _send_body(b"".join([call.reply.push(index, delta) for index, delta in mail]), send)
        last = call.reply.end()
    except BaseException as error:
        if not is_recoverable(error):
            raise
        _LOG.exception("a stream failed: request %s", request_id)
        last = call.form.error(error_body(endpoint, error_response(error)))
    finally:
        alive.cancel()
    await _send_body(last, send, more=False)


async def send_json(status: int, body: Mapping[str, Any], send: Send, headers: Mapping[str, str] | None = None) -> None:
    """Send a JSON body."""
    await send_content(status, json_bytes(body), send, headers or {})


async def send_content(status: int, content: bytes, send: Send, headers: Mapping[str, str]) -> None:
    """Send a JSON body that is written already."""
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    lines += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await _send_body(content, send)
    await _send_body(b"", send, more=False)  # waits until the client has read most of it


async def _fill_silence(timer: RequestTimer, alive: bytes, send: Send) -> None:
    """One clock for a whole stream: setting one for each event costs as much as the event."""
    heard = time.monotonic()
    while True:
        await asyncio.sleep(heard + QUIET_S - time.monotonic())
        if timer.heard > heard:
            heard = timer.heard
        else:
            await _send_body(alive, send)
            heard = time.monotonic()


async def _send_body(chunk: bytes, send: Send, *, more: bool = True) -> None:
    """Waits for a client that reads slowly; one that does not read at all is the connection's to give up."""
    if chunk or not more:
        await send({"type": "http.response.body", "body": chunk, "more_body": more})
