"""Answers as Markdown on a terminal, paragraph by paragraph, where `rich` is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from spyglass.cli.reasoning import ANSWER, REASONING
from spyglass.cli.talk import PlainScreen, Screen

_FENCE = "```"


def make_screen(*, markdown: bool) -> Screen:
    """What shows answers: Markdown if it is wanted, `rich` is there, and the terminal can move its cursor."""
    if not markdown or find_spec("rich") is None:
        return PlainScreen()
    from rich.console import Console

    console = Console()
    return MarkdownScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen()


class MarkdownScreen:
    """The paragraph that is being written stands there as it comes; once it is complete it is set as Markdown.

    Reasoning is shown as it comes.
    """

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self._console, self._reasoned = console, False
        self._live = Live(console=console, transient=True, auto_refresh=False)
        self._begun, self._plain, self._block = False, PlainScreen(), ""

    def push(self, text: str) -> None:
        from rich.text import Text

        if not self._begun and (self._reasoned or text.startswith(REASONING)):
            reasoning, mark, text = text.partition(ANSWER)
            self._reasoned = not mark
            self._plain.push(reasoning + mark)
            if not mark:
                return
        self._begun = self._begun or bool(text)
        self._block += text
        done, self._block = complete_blocks(self._block)
        if done.strip():
            self._set(done)
        if self._block.strip():
            self._live.start()
            self._live.update(Text(self._block), refresh=True)

    def end(self) -> None:
        self._live.stop()
        if self._block.strip():
            self._set(self._block)
        elif not self._begun:
            self._plain.end()

    def _set(self, text: str) -> None:
        from rich.markdown import Markdown

        self._live.stop()
        self._console.print(Markdown(text))


def complete_blocks(text: str) -> tuple[str, str]:
    """What of a text can be set already, up to the last empty line outside of a code block, and the rest."""
    end = 0
    position = text.find("\n\n")
    while position >= 0:
        if text.count(_FENCE, 0, position) % 2 == 0:
            end = position + 2
        position = text.find("\n\n", position + 1)
    return text[:end], text[end:]
