"""The protocols that are served, in one list."""

from __future__ import annotations

from spyglass.server.chat import ChatEndpoint
from spyglass.server.exchange import Endpoint, Served


def make_endpoints(served: Served) -> tuple[Endpoint, ...]:
    """One object per path of the protocols."""
    return (ChatEndpoint(served),)
