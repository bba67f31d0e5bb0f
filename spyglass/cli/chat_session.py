"""A chat in the terminal: lines that are typed become questions, images and settings of a `Talk`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from spyglass.cli.markdown import make_screen
from spyglass.cli.talk import Talk
from spyglass.config.fields import integer, number
from spyglass.errors import PromptError, SpyglassError, did_you_mean
from spyglass.progress import tell
from spyglass.train.stopping import asked_to_stop

if TYPE_CHECKING:
    from spyglass.engine import SamplingParams

HISTORY = "~/.local/state/spyglass/chat_history"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif")
_WORD = re.compile(r"""'(?P<single>[^']+)'|"(?P<double>[^"]+)"|(?P<bare>(?:\\.|[^\s\\])+)""")
_COMMAND = re.compile(r"/(?P<name>[a-z?]*)(?:\s+(?P<rest>.*))?")
_NUMBERS: dict[str, Callable[[str], Any]] = {
    "max_tokens": integer, "temperature": number, "top_p": number, "top_k": integer, "min_p": number, "seed": integer,
}  # fmt: skip
_FETCH_SECONDS, _MOST_FETCHED = 60, 64 << 20
_QUOTES = '"""'
_ABOUT = f"""\
/image FILE|URL ...   show images with the next question; a path or address in
                      a line, or dropped into it, does too
/clear                begin a new conversation
/set                  show the settings; /set NAME VALUE changes one, /set NAME
                      takes it back: {", ".join([*_NUMBERS][:4])},
                      {", ".join([*_NUMBERS][4:])}, thinking (on, off), effort,
                      system (a text), markdown (on, off)
/save FILE.jsonl      append the conversation as a line that
                      `spyglass finetune --data` reads
/help                 this
/exit                 end, as Ctrl+D does; Ctrl+C stops an answer and keeps the
                      conversation
{_QUOTES}                   begins and ends a question of several lines"""


class Chat:
    """One session: what was typed becomes questions, images and settings of a `Talk`."""

    def __init__(self, talk: Talk, *, quiet: bool) -> None:
        self._talk, self._quiet = talk, quiet
        self._first, self._defaults = talk.params, (talk.thinking, talk.effort)
        self._images: list[Path | bytes] = []
        self._markdown = True

    def run(self, images: list[Path]) -> None:
        """Read lines until the end of input or /exit."""
        self._images = list(images)
        if not self._quiet:
            tell("/help lists commands, Ctrl+C stops an answer, Ctrl+D ends the chat")
        with _history():
            while (line := self._read()) is not None:
                try:
                    if not self._take(line):
                        return
                except SpyglassError as error:
                    tell(f"error: {error}")

    def _read(self) -> str | None:
        """The next line; None at the end of input."""
        while True:
            try:
                line = input("> ").strip()
                return self._several(line) if line.startswith(_QUOTES) else line
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\n(Ctrl+D or /exit ends the chat)")

    def _several(self, line: str) -> str:
        """A message of several lines, from its first on; the end of input ends it, too."""
        with contextlib.suppress(EOFError):
            while len(line) < 2 * len(_QUOTES) or not line.endswith(_QUOTES):
                line = f"{line}\n{input('... ')}".rstrip()
        return line.removeprefix(_QUOTES).removesuffix(_QUOTES).strip()

    def _take(self, line: str) -> bool:
        """Do what a line says; False to end."""
        if (command := _COMMAND.fullmatch(line)) is not None:  # a path has more than letters before its first blank
            return self._command(command["name"], (command["rest"] or "").strip())
        images, text = images_in(line)
        self._images += images
        for word in text.split():
            if Path(word).suffix.lower() in IMAGE_SUFFIXES:
                tell(f"there is no file {word} here; it is sent as text")
        if text:
            self._ask(text)
        elif images:
            self._tell_images()
        return True

    def _ask(self, text: str) -> None:
        images, self._images = self._images, []
        with asked_to_stop(signal.SIGINT) as stop:
            self._talk.ask(text, images, screen=make_screen(markdown=self._markdown), stop=stop)

    def _command(self, name: str, rest: str) -> bool:
        if name in ("exit", "quit", "bye"):
            return False
        does = {"image": self._image, "clear": self._clear, "set": self._set, "save": self._save}
        if name in does:
            does[name](rest)
        elif name in ("help", "?"):
            print(_ABOUT)
        else:
            near = did_you_mean(f"/{name}", [f"/{known}" for known in (*does, "help", "exit")])
            tell(f"/{name} is no command; /help lists them{near}")
        return True

    def _image(self, rest: str) -> None:
        if not (words := [_spelled(word) for word in _WORD.finditer(rest)]):
            raise PromptError("/image needs the path or address of an image")
        self._images += [_open(word) for word in words]
        self._tell_images()

    def _tell_images(self) -> None:
        count = len(self._images)
        tell(f"{count} image{'' if count == 1 else 's'} for the next question")

    def _clear(self, rest: str) -> None:
        self._talk.messages[:] = [message for message in self._talk.messages if message["role"] == "system"]
        self._images.clear()
        tell("a new conversation")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name, value, talk = name.replace("-", "_"), value.strip(), self._talk
        if name in _NUMBERS:
            talk.params = self._with(name, value)
        elif name == "thinking":
            talk.thinking = _switch(name, value or "off")
        elif name == "effort":
            talk.effort = value or None
        elif name == "markdown":
            self._markdown = _switch(name, value or "on")
        elif name == "system":
            talk.messages[:] = [message for message in talk.messages if message["role"] != "system"]
            if value:
                talk.messages.insert(0, {"role": "system", "content": value})
        elif name:
            raise PromptError(f"there is no setting {name!r}; /help lists them")
        self._show()

    def _with(self, name: str, value: str) -> SamplingParams:
        if not value:
            return replace(self._talk.params, **{name: getattr(self._first, name)})
        try:
            return replace(self._talk.params, **{name: _NUMBERS[name](value)})
        except ValueError as error:
            raise PromptError(f"{name}: {error}") from None

    def _show(self) -> None:
        talk = self._talk
        system = next((message["content"] for message in talk.messages if message["role"] == "system"), None)
        settings = {name: getattr(talk.params, name) for name in _NUMBERS} | {
            "thinking": "on" if talk.thinking else "off",
            "effort": talk.effort,
            "system": system,
            "markdown": "on" if self._markdown else "off",
        }
        print("\n".join(f"{name:<12}{'not set' if value is None else value}" for name, value in settings.items()))

    def _save(self, rest: str) -> None:
        if not rest or not self._talk.messages:
            raise PromptError("/save needs the name of a file, and a conversation to put into it")
        path = Path(os.path.expanduser(rest))
        line = json.dumps({"messages": [_as_data(message) for message in self._talk.messages]}, ensure_ascii=False)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise PromptError(f"{path} cannot be written: {error.strerror}") from None
        tell(f"saved to {path}")


def images_in(line: str) -> tuple[list[Path | bytes], str]:
    """The images that a line names, by path (bare, quoted, escaped or as file://) or address, and the rest of it.

    Raises:
        PromptError: what has an image's ending is not there, or is no image.
    """
    images: list[Path | bytes] = []
    kept, at = [], 0
    for word in _WORD.finditer(line):
        spelled = _spelled(word)
        if _is_image(spelled):
            images.append(_open(spelled))
            kept.append(line[at : word.start()].rstrip())
            at = word.end()
    return images, "".join([*kept, line[at:]]).strip()


def _spelled(word: re.Match[str]) -> str:
    """A word without its quotes or the backslashes of a shell."""
    return word["single"] or word["double"] or re.sub(r"\\(.)", r"\1", word["bare"])


def _is_image(word: str) -> bool:
    """Whether a word of a line means an image: an address or path with an image's ending, of a file where it has no
    folder (so that "is this a .png?" is a question)."""
    if not word.lower().split("?")[0].endswith(IMAGE_SUFFIXES):
        return False
    return "/" in word or os.path.isfile(word)


def _open(word: str) -> Path | bytes:
    """An image, looked at once."""
    from spyglass.prompt.decode import open_image

    if word.startswith(("http://", "https://")):
        data = _fetch(word)
        open_image(data, name=word)
        return data
    path = Path(os.path.expanduser(unquote(urlsplit(word).path) if word.startswith("file://") else word))
    open_image(path, name=str(path))
    return path.absolute()


def _fetch(url: str) -> bytes:
    """The bytes at an address that the person at the terminal typed."""
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(url, headers={"User-Agent": "spyglass"}), timeout=_FETCH_SECONDS) as answer:
            data: bytes = answer.read(_MOST_FETCHED + 1)
    except (OSError, ValueError) as error:
        raise PromptError(f"{url} cannot be fetched: {error}") from None
    if len(data) > _MOST_FETCHED:
        raise PromptError(f"{url} is larger than {_MOST_FETCHED >> 20} MiB")
    return data


def _switch(name: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise PromptError(f"{name} is on or off, not {value!r}")
    return value == "on"


def _as_data(message: dict[str, Any]) -> dict[str, Any]:
    """A message as JSON: paths as texts, fetched images as data URLs."""
    import base64

    def part(entry: dict[str, Any]) -> dict[str, Any]:
        if entry["type"] != "image_url":
            return entry
        source = entry["image_url"]["url"]
        encoded = base64.b64encode(source).decode() if isinstance(source, bytes) else ""
        return {**entry, "image_url": {"url": f"data:;base64,{encoded}" if encoded else str(source)}}

    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": [part(entry) for entry in content]}


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Editing of lines, and those of earlier sessions, where the system has them and the home can be written."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = os.path.expanduser(HISTORY)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            readline.write_history_file(path)
            os.chmod(path, 0o600)
