"""An answer that begins with reasoning, as `spyglass run` prints it: the two apart, whatever pieces they come in."""

from __future__ import annotations

_END = "</think>"
_DIM, _PLAIN_AGAIN = "\x1b[2m", "\x1b[0m"
REASONING, ANSWER = f"{_DIM}Reasoning:\n", f"{_PLAIN_AGAIN}\n\nAnswer:\n"
_TERMINAL = (REASONING, ANSWER)
_PLAIN = ("<think>\n", "\n</think>\n")


class Unfolded:
    """What to print of an answer, piece by piece.

    Reasoning stands on lines of its own: dim, under a heading on a terminal, between lines `<think>` and `</think>`
    where a program may read. Without any there is only the answer; reasoning that was cut off has no end line and no
    answer.
    """

    def __init__(self, *, reasoning: bool, terminal: bool) -> None:
        self._opening, self._closing = _TERMINAL if terminal else _PLAIN
        self._reasoning, self._reasoned, self._begun = reasoning, False, False
        self._held = ""

    @property
    def unanswered(self) -> bool:
        """Whether the answer proper has not come."""
        return self._reasoning

    def push(self, text: str) -> str:
        """What can be printed now; white space around reasoning and before the answer behind it is left out."""
        if not self._reasoning:
            return self._answer(text)
        reasoned, end, rest = (self._held + text).partition(_END)
        known = len(reasoned) if end else len(reasoned) - _begun(reasoned)
        shown = reasoned[:known].rstrip()
        self._held = reasoned[len(shown) :]
        shown = shown if self._reasoned else shown.lstrip()
        if shown and not self._reasoned:
            shown, self._reasoned = self._opening + shown, True
        if not end:
            return shown
        self._held, self._reasoning = "", False
        return shown + (self._closing if self._reasoned else "") + self._answer(rest)

    def finish(self) -> str:
        """What was held back of an answer that is over."""
        rest = self._held.rstrip() if self._reasoned else self._held.strip()
        self._held = ""
        told = rest if self._reasoned or not rest else self._opening + rest
        cut = self._reasoning and (self._reasoned or bool(rest)) and self._opening == REASONING
        return told + (_PLAIN_AGAIN if cut else "")

    def _answer(self, text: str) -> str:
        if self._reasoned and not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return text


def answer_of(text: str) -> str:
    """The answer behind the reasoning that a text begins with; nothing if it never ended."""
    return text.partition(_END)[2].lstrip()


def _begun(text: str) -> int:
    """Letters at the end of a text that may turn out to begin the end of the reasoning."""
    return max(length for length in range(len(_END)) if text.endswith(_END[:length]))
