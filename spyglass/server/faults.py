"""What went wrong, as an HTTP status and words for the client."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from spyglass.errors import AdapterError, CapacityError, NotServedError, OverloadedError, PromptError
from spyglass.server.exchange import Endpoint

NEUTRAL = "the server failed to handle this request; it has been logged under the request id"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How a request is refused. `field` of it is at fault, if one is. `known` False: a fault of ours, to be logged."""

    status: int
    message: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    field: str | None = None
    known: bool = True


def fault_of(error: Exception) -> Fault:
    """The fault that an exception comes to."""
    if isinstance(error, PromptError | CapacityError | AdapterError):
        return Fault(status=400, message=str(error))
    if isinstance(error, NotServedError):
        return Fault(status=404, message=str(error), field="model")
    if isinstance(error, OverloadedError):
        wait = {"retry-after": str(math.ceil(error.retry_after_s))}
        return Fault(status=429, message=str(error), headers=wait)
    if isinstance(error, HTTPException):
        return Fault(status=error.status_code, message=error.detail, headers=error.headers or {})
    return Fault(status=500, message=NEUTRAL, known=False)


def error_body(endpoint: Endpoint | None, fault: Fault) -> Mapping[str, Any]:
    """The JSON that tells a client: in its protocol's form, elsewhere in that of OpenAI."""
    if endpoint is not None:
        return endpoint.error(fault.status, fault.message, field=fault.field)
    kind = _KINDS.get(fault.status, "invalid_request_error" if fault.status < 500 else "server_error")
    return {"error": {"message": fault.message, "type": kind, "param": None, "code": None}}
