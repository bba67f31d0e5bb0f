"""Time and memory: who runs next, where rows live, how tokens are drawn. `LLM` is the entry."""

from spyglass.engine.engine import Engine
from spyglass.engine.llm import LLM
from spyglass.engine.request import Delta, RequestOutput, SamplingParams, Structured, TokenLogprob, Usage
from spyglass.prompt.tokens import Patches

__all__ = [
    "LLM",
    "Delta",
    "Engine",
    "Patches",
    "RequestOutput",
    "SamplingParams",
    "Structured",
    "TokenLogprob",
    "Usage",
]
