"""Progress is told where nobody sees a bar, also while a step takes long."""

from __future__ import annotations

import time

import pytest

from spyglass.progress import Progress, shown_bytes


class Screen:
    """Standard error as a terminal, or as a file."""

    def __init__(self, *, terminal: bool) -> None:
        self.text, self._terminal = "", terminal

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> object:
    def made(*, terminal: bool) -> Screen:
        screen = Screen(terminal=terminal)
        monkeypatch.setattr("sys.stderr", screen)
        return screen

    return made


def wait_for(screen: Screen, text: str) -> None:
    while text not in screen.text:
        time.sleep(0.01)


def test_without_a_terminal_a_step_that_takes_long_is_told_in_lines(use: object) -> None:
    screen = use(terminal=False)  # type: ignore[operator]
    with Progress(total=4, unit="step", desc="training", line_seconds=0.02) as bar:
        bar.update(1)
        bar.set_postfix_str("loss 3.0", refresh=False)
        wait_for(screen, "training: 25 %, 1 of 4 in 00:00, ")
        assert "loss 3.0\n" in screen.text and "\r" not in screen.text and "|" not in screen.text
    ended = screen.text
    time.sleep(0.1)
    assert screen.text == ended, "no line after the end"


def test_what_ends_soon_says_nothing_without_a_terminal(use: object) -> None:
    screen = use(terminal=False)  # type: ignore[operator]
    with Progress(total=4, desc="loading") as bar:
        bar.update(4)
    assert screen.text == ""


def test_a_terminal_has_a_bar_and_who_wants_none_has_none(use: object) -> None:
    screen = use(terminal=True)  # type: ignore[operator]
    with Progress(total=4, desc="loading") as bar:
        bar.update(4)
    assert "loading: 100%|" in screen.text and "\r" in screen.text
    screen = use(terminal=True)  # type: ignore[operator]
    with Progress(total=4, desc="loading", show=False) as bar:
        bar.update(4)
    assert screen.text == ""


def test_an_amount_unknown_beforehand_is_counted(use: object) -> None:
    screen = use(terminal=False)  # type: ignore[operator]
    with Progress(unit="B", unit_scale=True, desc="writing", line_seconds=0.02) as bar:
        bar.update(2_000_000)
        wait_for(screen, "writing: 2.00M in 00:00")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(999, "1.0 kB"), (1e6, "1.0 MB"), (999.9e6, "999.9 MB"), (160e9, "160.00 GB")]
)
def test_an_amount_is_told_in_the_unit_it_is_read_in(nbytes: float, text: str) -> None:
    assert shown_bytes(nbytes) == text
