"""The chat in a terminal, through a pseudo-terminal: images, commands, Ctrl+C, history, Markdown."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from spyglass.cli.chat_session import images_in
from spyglass.cli.markdown import complete_blocks
from spyglass.errors import PromptError

ROOT = Path(__file__).parents[3]
SHAPES = ROOT / "examples" / "shapes.jpg"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program on a pseudo-terminal: what is typed, and what is on the screen since."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._own, other = pty.openpty()
        self._seen = ""
        kept = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of compiled kernels
        env = {
            **os.environ,
            "XDG_CACHE_HOME": kept,
            "HOME": str(folder),
            "TERM": "xterm",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "200",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spyglass", *words],
            stdin=other,
            stdout=other,
            stderr=other,
            env=env,
            cwd=folder,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
        )
        os.close(other)

    def until(self, text: str, seconds: float = 60) -> str:
        """What appears, up to and with a text; what comes after it is kept for the next call."""
        while text not in self._seen:
            ready, _, _ = select.select([self._own], [], [], seconds)
            assert ready, f"{text!r} did not come; there is {self._seen!r}"
            try:
                piece = os.read(self._own, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                piece = ""
            assert piece, f"the program ended before {text!r}; there is {self._seen!r}"
            self._seen = ESCAPES.sub("", self._seen + piece)
        before, found, self._seen = self._seen.partition(text)
        return before + found

    def type(self, line: str, until: str = "\n> ") -> str:
        """Type a line; what appears until the next prompt."""
        os.write(self._own, line.encode() + b"\n")
        self.until(line[-20:].strip())  # its echo
        return self.until(until)

    def press(self, key: bytes) -> None:
        os.write(self._own, key)

    def interrupt(self, until: str) -> None:
        """Press Ctrl+C until a text appears: one that comes just before a line is read is seen at the next."""
        while True:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(AssertionError):
                self.until(until, seconds=2)
                return

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    opened = Terminal(tmp_path, "chat", "spyglass-tiny-v4", "--device", "cpu", "--temperature", "0", "--threads", "1")
    opened.until("Ctrl+D ends the chat\r\n> ")
    yield opened
    opened.close()


@pytest.mark.slow
def test_a_chat_takes_images_commands_and_ends_when_told(terminal: Terminal, tmp_path: Path) -> None:
    assert "1 image for the next question" in terminal.type(f"/image {SHAPES}")
    assert "triangle" in terminal.type("What shape is the red thing?")
    assert "triangle" in terminal.type(f"{SHAPES} What shape is the red thing?")
    assert "/imgae is no command; /help lists them; did you mean /image?" in terminal.type("/imgae x")
    assert "nowhere.png cannot be read" in terminal.type("/image nowhere.png")
    assert "no file nowhere.png here; it is sent as text" in terminal.type("nowhere.png What is it?")
    terminal.type('"""What shape is', until="... ")
    terminal.type('the red thing?"""')
    assert "temperature 0.5" in re.sub(" +", " ", terminal.type("/set temperature 0.5"))
    assert "temperature 0.0" in re.sub(" +", " ", terminal.type("/set temperature"))
    assert "error: temperature" in terminal.type("/set temperature hot")
    about = terminal.type("/help")
    assert "/save FILE" in about and all(len(line) < 80 for line in about.splitlines())
    terminal.type("/save talk.jsonl")
    (line,) = (tmp_path / "talk.jsonl").read_text().splitlines()
    messages = json.loads(line)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 4
    assert messages[6]["content"][0]["text"] == "What shape is\nthe red thing?"
    assert messages[0]["content"][0]["image_url"]["url"] == str(SHAPES)
    assert "a new conversation" in terminal.type("/clear")
    told = terminal.type("What shape is the red thing?")
    assert "of images" not in told, "the image went with the conversation"
    terminal.press(b"\x04")
    assert terminal.process.wait(30) == 0
    history = (tmp_path / ".local/state/spyglass/chat_history").read_text()
    assert "What shape is the red thing?" in history


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_keeps_the_chat(terminal: Terminal) -> None:
    terminal.type("/set max_tokens 16000")
    terminal.type("/set temperature 5")  # an answer without end
    terminal.press(b"Count.\n")
    terminal.until("Count.\r\n")
    terminal.until(" ")
    terminal.process.send_signal(signal.SIGINT)
    assert "stopped; the conversation goes on" in terminal.until("\n> ")
    terminal.interrupt("ends the chat)")
    terminal.type("/set temperature 0")
    assert "triangle" in terminal.type("/clear") + terminal.type(f"'{SHAPES}' What shape is the red thing?")
    assert "/help" in terminal.type("/nothing")
    terminal.press(b"/exit\n")
    assert terminal.process.wait(30) == 0


@pytest.mark.slow
def test_quiet_shows_answers_alone_and_reasoning_is_dim(tmp_path: Path) -> None:
    words = ("chat", "--quiet", "--device", "cpu", "--temperature", "0", "--thinking", "on", "--threads", "1")
    opened = Terminal(tmp_path, *words)
    try:
        opened.until("> ")
        told = opened.type(f"What colour is the triangle? {SHAPES}")
        assert "Reasoning:" in told and "Answer:" in told and "spyglass:" not in told
    finally:
        opened.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "two words.JPG"):
        Image.new("RGB", (20, 20), "red").save(tmp_path / name, "PNG")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "names", "text"),
    [
        ("a.png What is it?", ["a.png"], "What is it?"),
        ("What is it? HERE/a.png", ["a.png"], "What is it?"),
        ("Compare './a.png' and \"HERE/two words.JPG\" now", ["a.png", "two words.JPG"], "Compare and now"),
        (r"HERE/two\ words.JPG", ["two words.JPG"], ""),
        ("file://HERE/two%20words.JPG what?", ["two words.JPG"], "what?"),
        ("is this a .png or a b.png?", [], "is this a .png or a b.png?"),
        ("don't say 1/2 of it", [], "don't say 1/2 of it"),
    ],
)
def test_a_path_in_a_line_is_an_image_however_it_is_spelled(line: str, names: list[str], text: str, here: Path) -> None:
    images, rest = images_in(line.replace("HERE", str(here)))
    assert [Path(str(image)).resolve() for image in images] == [here / name for name in names]
    assert rest == text


def test_a_path_that_is_no_image_is_told(here: Path) -> None:
    (here / "b.png").write_text("text")
    with pytest.raises(PromptError, match=r"b\.png"):
        images_in("./b.png what?")
    with pytest.raises(PromptError, match=r"none\.png cannot be read: No such file"):
        images_in("./none.png what?")


def test_an_address_in_a_line_is_fetched() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(buffer, "PNG")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.startswith("/a.png")
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(buffer.getvalue() if found else b"")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        place = f"http://127.0.0.1:{server.server_address[1]}"
        assert images_in(f"What is {place}/a.png?size=2") == ([buffer.getvalue()], "What is")
        with pytest.raises(PromptError, match="cannot be fetched: HTTP Error 404"):
            images_in(f"{place}/b.png")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one", ""),
        ("one\n\ntwo", "one\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
    ],
)
def test_a_paragraph_is_set_when_it_is_complete_and_code_is_not_cut(text: str, done: str) -> None:
    assert complete_blocks(text) == (done, text[len(done) :])
