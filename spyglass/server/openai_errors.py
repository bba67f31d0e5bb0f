"""Error bodies as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

_KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", None),
    404: ("not_found_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def openai_error(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    """The body of an error; `field` is the request's field at fault, if one is."""
    kind, code = _KINDS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    if status == 404 and field == "model":  # else it is the path that is unknown
        code = "model_not_found"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
