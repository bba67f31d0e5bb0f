"""Time and memory: who runs next, where rows live, how tokens are drawn. `LLM` is the entry.

It and `Engine` are looked up on first use: a process that only reads requests never loads torch.
"""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from spyglass.engine.engine import Engine
    from spyglass.engine.llm import LLM


def __getattr__(name: str) -> object:
    if name == "LLM":
        import spyglass.engine.llm

        return spyglass.engine.llm.LLM
    if name == "Engine":
        import spyglass.engine.engine

        return spyglass.engine.engine.Engine
    raise AttributeError(f"module 'spyglass.engine' has no attribute {name!r}")
