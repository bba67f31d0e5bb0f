"""The protocols that are served, in one list."""

from __future__ import annotations

from spyglass.server.exchange import Endpoint, Served
from spyglass.server.protocols.chat import ChatEndpoint
from spyglass.server.protocols.completions import CompletionsEndpoint
from spyglass.server.protocols.count import CountMessages, CountResponses, Detokenize, Tokenize
from spyglass.server.protocols.messages import MessagesEndpoint
from spyglass.server.protocols.ollama import OllamaChat, OllamaGenerate, OllamaShow
from spyglass.server.protocols.responses import ResponsesEndpoint


def make_endpoints(served: Served) -> tuple[Endpoint, ...]:
    """One object per path of the protocols."""
    return (
        ChatEndpoint(served),
        ResponsesEndpoint(served),
        MessagesEndpoint(served),
        CompletionsEndpoint(served),
        CountMessages(served),
        CountResponses(served),
        Tokenize(served),
        Detokenize(served),
        OllamaChat(served),
        OllamaGenerate(served),
        OllamaShow(served),
    )
