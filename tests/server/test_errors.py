"""What an exception comes to for a client: its status, its words, when to come again, and nothing of our inside."""

from __future__ import annotations

import pytest
from starlette.exceptions import HTTPException

from spyglass.errors import AdapterError, CapacityError, NotServedError, OverloadedError, PromptError, SpyglassError
from spyglass.server.errors import INTERNAL, error_body, error_response


@pytest.mark.parametrize(
    ("error", "status"),
    [(PromptError("x"), 400), (CapacityError("x"), 400), (AdapterError("x"), 400), (NotServedError("x"), 404),
     (OverloadedError("x"), 429), (HTTPException(405, "x"), 405)],
)  # fmt: skip
def test_what_a_client_can_mend_is_told_in_the_errors_own_words(error: Exception, status: int) -> None:
    fault = error_response(error)
    assert (fault.status, fault.message, fault.known) == (status, "x", True)


@pytest.mark.parametrize("error", [SpyglassError("a secret"), KeyError("a secret")])
def test_a_fault_of_ours_is_told_in_neutral_words_and_logged(error: Exception) -> None:
    fault = error_response(error)
    assert (fault.status, fault.message, fault.known) == (500, INTERNAL, False)


def test_a_machine_without_memory_is_told_to_come_again_and_logged() -> None:
    fault = error_response(MemoryError("a secret"))
    assert (fault.status, fault.known) == (503, False) and "secret" not in fault.message


@pytest.mark.parametrize(("seconds", "told"), [(0.2, "1"), (1.0, "1"), (1.1, "2"), (30, "30")])
def test_who_must_come_again_is_told_a_whole_number_of_seconds_that_suffices(seconds: float, told: str) -> None:
    assert error_response(OverloadedError("full", seconds)).headers == {"retry-after": told}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"),
     (405, "invalid_request_error"), (413, "request_too_large"), (429, "rate_limit_error"), (500, "server_error"),
     (503, "overloaded_error")],
)  # fmt: skip
def test_outside_the_protocols_every_status_has_its_kind(status: int, kind: str) -> None:
    body = error_body(None, error_response(HTTPException(status, "x")))
    assert (body["error"]["message"], body["error"]["type"], body["error"]["param"]) == ("x", kind, None)
