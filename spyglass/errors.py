"""Everything that can go wrong, one class per kind.

A message says what was wrong, what was expected, and what to do. `assert` is for our own bugs only; whatever a person,
a file or a request can cause raises one of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class SpyglassError(Exception):
    """Root of every error Spyglass raises on purpose."""


class ConfigError(SpyglassError):
    """A model or engine configuration is malformed, incomplete or of an unknown family."""


class CheckpointError(SpyglassError):
    """Files on disk do not hold what the configuration promises, or are damaged."""


class PromptError(SpyglassError):
    """A message, image or token list cannot become a prompt."""


class AdapterError(SpyglassError):
    """An adapter is damaged, does not fit the model, or asks for something not implemented."""


class CapacityError(SpyglassError):
    """A request or model does not fit into the memory or the limits it was given."""


class DeviceError(SpyglassError):
    """A device, dtype or op implementation that was asked for cannot run here."""


class RankError(SpyglassError):
    """One of the processes that have the parts of a model has ended, hangs or failed: none of them can go on."""


class NotServedError(SpyglassError):
    """A request names a model or adapter that is not served here."""


class OverloadedError(SpyglassError):
    """The queue is full: the same request may be sent again. `retry_after_s` says when, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that it resembles, if one does.

    Dashes before a name say nothing of it, and one letter resembles nothing.
    """
    import difflib

    names = {name.lstrip("-"): name for name in known}
    word = text[:100].lstrip("-")
    near = difflib.get_close_matches(word, names, n=1) if len(word) > 1 else []
    return f"; did you mean {names[near[0]]}?" if near else ""


def json_kind(value: object) -> str:
    """What a value is, in the words of JSON and not of Python, for messages to people who sent it."""
    kinds = ((bool, "true or false"), (int | float, "a number"), (str, "a string"), (list | tuple, "a list"))
    if value is None:
        return "null or missing"
    found = next((words for kind, words in kinds if isinstance(value, kind)), None)
    return found or ("an object" if isinstance(value, Mapping) else f"a {type(value).__name__}")


def is_recoverable(error: BaseException) -> bool:
    """Whether an error concerns the work alone that raised it: any `Exception`, and the panic of a library written in
    Rust, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
