"""What went wrong, as an HTTP status and words for the client, in the error bodies of the protocols."""

from __future__ import annotations

import dataclasses
import errno
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from spyglass.config.engine import EngineConfig
from spyglass.engine.request import SamplingParams
from spyglass.errors import AdapterError, CapacityError, NotServedError, OverloadedError, PromptError, SpyglassError
from spyglass.server.exchange import Endpoint
from spyglass.server.protocols.fields import RequestError

INTERNAL = "the server failed to handle this request; it has been logged under the request id"
_OPENAI = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    413: ("request_too_large", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    503: ("overloaded_error", None),
}
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
_LACKS = {
    errno.ENOMEM: "memory", errno.EMFILE: "more open files", errno.ENFILE: "more open files",
    errno.ENOSPC: "space on its disk", errno.EAGAIN: "more processes",
}  # fmt: skip
_OPTIONS = "|".join(option.name for option in dataclasses.fields(EngineConfig))
# Where a message begins with the place at fault: `messages[0].content[1].image_url: ...`, `top_p is 0, ...`
_PARAMS = "|".join(param.name for param in dataclasses.fields(SamplingParams))
_PLACE = re.compile(rf"(?:messages|input|prompt|tools)(?:\[\d+\]|\.\w+)+|(?:{_PARAMS})(?= (?:is|of|has|must)\b)")
_ADVICE = re.compile(rf"\b(raise|lower|set) ({_OPTIONS})\b")


class TooLongError(RequestError, CapacityError):
    """A prompt that does not fit the context. Programs look for its code, or for the words of one of the protocols."""

    def __init__(self, num_tokens: int, limit: int, *, field: str, at_least: bool = False) -> None:
        super().__init__(
            f"prompt is too long: {num_tokens} tokens > {limit} maximum{' (at least)' if at_least else ''}. This "
            f"model's maximum context length is {limit} tokens for prompt and answer together; shorten {field}",
            field=field,
            code="context_length_exceeded",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """How a request is refused. `field` of it is at fault, if one is. Not `known`: an internal error, to be logged."""

    status: int
    message: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    field: str | None = None
    code: str | None = None
    known: bool = True


def error_response(error: BaseException) -> ErrorResponse:
    """The response that an exception comes to."""
    if isinstance(error, RequestError):
        return ErrorResponse(status=400, message=_to_client(error), field=error.field, code=error.code)
    if isinstance(error, PromptError | CapacityError | AdapterError):
        place = _PLACE.match(str(error))
        return ErrorResponse(status=400, message=_to_client(error), field=place and place[0])
    if isinstance(error, NotServedError):
        return ErrorResponse(status=404, message=str(error), field="model", code="model_not_found")
    if isinstance(error, OverloadedError):
        wait = {"retry-after": str(math.ceil(error.retry_after_s))}
        return ErrorResponse(status=429, message=str(error), headers=wait)
    if isinstance(error, HTTPException):
        return ErrorResponse(status=error.status_code, message=error.detail, headers=error.headers or {})
    code = errno.ENOMEM if isinstance(error, MemoryError) else error.errno if isinstance(error, OSError) else None
    if code in _LACKS:
        message = f"the machine has no {_LACKS[code]} for this request now; send it later"
        return ErrorResponse(status=503, message=message, headers={"retry-after": "5"}, known=False)
    return ErrorResponse(status=500, message=INTERNAL, known=False)


def _to_client(error: SpyglassError) -> str:
    """The words of an error; what advises an option says that it is one of the server's."""
    return _ADVICE.sub(r"\1 \2, an option of the server,", str(error))


def error_body(endpoint: Endpoint | None, response: ErrorResponse) -> Mapping[str, Any]:
    """The JSON that tells a client: in its protocol's form, elsewhere in that of OpenAI."""
    if endpoint is not None:
        return endpoint.error(response.status, response.message, field=response.field, code=response.code)
    return openai_error(response.status, response.message, field=response.field)


def openai_error(status: int, message: str, *, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it; `field` is the place of the request at fault, if one is."""
    default = ("server_error" if status >= 500 else "invalid_request_error", None)
    kind, usual = _OPENAI.get(status, default)
    return {"error": {"message": message, "type": kind, "param": field, "code": code or usual}}


def anthropic_error(status: int, message: str, **_: Any) -> dict[str, Any]:
    """An error as Anthropic's clients read it, who have no places and codes."""
    kind = _ANTHROPIC.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
