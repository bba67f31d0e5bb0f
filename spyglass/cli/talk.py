"""A conversation with a model on a terminal or in a pipe: questions go in, answers are printed as they come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spyglass.cli.options import ADAPTER
from spyglass.cli.reasoning import Unfolded, answer_of
from spyglass.errors import SpyglassError
from spyglass.progress import tell

if TYPE_CHECKING:
    from spyglass.engine import LLM, RequestOutput, SamplingParams

Note = Callable[[str], None]


class Screen(Protocol):
    """Where an answer is shown."""

    def push(self, text: str) -> None:
        """Show a piece."""

    def end(self) -> None:
        """The answer is over."""


class PlainScreen:
    """Standard output, as it comes."""

    def push(self, text: str) -> None:
        print(text, end="", flush=True)

    def end(self) -> None:
        """Print the end of the line."""
        print(flush=True)


class Talk:
    """A conversation so far, and how it is answered. All of it may be changed between questions."""

    def __init__(
        self, llm: LLM, params: SamplingParams, *, thinking: bool, effort: Any, stream: bool, note: Note = tell
    ) -> None:
        self._llm, self._stream, self._note = llm, stream, note
        self.params, self.thinking, self.effort = params, thinking, effort
        self.messages: list[dict[str, Any]] = []

    def ask(
        self,
        question: str,
        images: Sequence[Path | bytes],
        *,
        screen: Screen | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Put a question, print the answer and its numbers. `stop` ends the answer, which is kept as far as it came.

        Raises:
            SpyglassError: the question cannot be answered; the conversation is as it was before.
        """
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        self.messages.append({"role": "user", "content": [*parts, {"type": "text", "text": question}]})
        try:
            answer = self._answer(len(images), screen or PlainScreen(), stop or threading.Event())
        except SpyglassError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})

    def _answer(self, images: int, screen: Screen, stop: threading.Event) -> str:
        started, adapter = time.perf_counter(), ADAPTER if ADAPTER in self._llm.adapters else None
        deltas = self._llm.stream(
            self.messages, self.params, thinking=self.thinking, effort=self.effort, adapter=adapter
        )
        times: list[float] = []
        output, text = None, ""
        unfolded = Unfolded(reasoning=self.thinking, terminal=sys.stdout.isatty())
        for delta in deltas:
            times.append(time.perf_counter())
            output, text = delta.output, text + delta.text
            if self._stream:
                screen.push(unfolded.push(delta.text))
            if stop.is_set():
                break
        screen.push(("" if self._stream else unfolded.push(text)) + unfolded.finish())
        screen.end()
        if output is None:
            self._note("stopped; the conversation goes on")
        else:
            if output.error is not None:
                self._note(output.error)
            elif unfolded.unanswered:
                more = "; raise --max-tokens for an answer" if output.finish_reason == "length" else ""
                self._note(f"it was still reasoning when it ended ({output.finish_reason}){more}")
            self._note(_numbers(output, images, started, times))
        return answer_of(text) if self.thinking else text  # the next prompt takes no reasoning


def _numbers(output: RequestOutput, images: int, started: float, times: Sequence[float]) -> str:
    usage = output.usage
    shown = f" ({usage.image_tokens} of images)" if images else ""
    told = f"prompt {usage.prompt_tokens} tokens{shown}, first token after {times[0] - started:.2f} s"
    told += f", answer {usage.completion_tokens} tokens ({output.finish_reason})"
    if len(times) > 1:
        told += f", {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s"
    return told
