"""Data files of other trainers: JSONL, JSON arrays and Parquet, and the shapes of chats that people keep in them.

Whatever an entry looks like, it becomes messages in OpenAI form; those are checked like all others. Columns that no
chat is made of are kept by name, for the run to tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spyglass.config.json_file import parse_json_text
from spyglass.errors import PromptError
from spyglass.prompt.data_url import is_data_url

_FORM = 'it needs lines of the form {"messages": [...]}'
_MARK = "<image>"
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant",
    "model": "assistant", "chatgpt": "assistant", "system": "system", "developer": "developer", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
_CHATS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("query", "response"), ("instruction", "output"), ("question", "answer"))
_IMAGES = ("images", "image")
_TASKS = ("task", "kind", "category")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a file: where it stands ("line 3", "row 3"), and what it holds or why it cannot be read."""

    place: str
    number: int
    value: Any
    fault: str | None = None


def read_entries(path: Path) -> list[Entry]:
    """Every entry of a JSONL file (empty lines passed over), a JSON array or a Parquet file.

    Raises:
        PromptError: the file cannot be read, is none of these, or is Parquet where pyarrow is not installed.
    """
    try:
        with open(path, "rb") as stream:
            if stream.read(4) == b"PAR1":
                return _parquet(path)
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{path} is no text (UTF-8) and no Parquet file; {_FORM}") from None
    if text.lstrip()[:1] == "[":
        try:
            values = parse_json_text(text)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{path} begins like a JSON array and is none: {error}") from None
        return [Entry(f"entry {number}", number, value) for number, value in enumerate(values, 1)]
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return [_line(number, line) for number, line in lines]


def _line(number: int, text: str) -> Entry:
    try:
        return Entry(f"line {number}", number, parse_json_text(text))
    except (ValueError, RecursionError) as error:
        return Entry(f"line {number}", number, None, f"not JSON: {error}")


def _parquet(path: Path) -> list[Entry]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise PromptError(
            f"{path} is a Parquet file, and pyarrow, which reads those, is not installed: pip install pyarrow"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are these
        raise PromptError(f"{path} cannot be read as Parquet: {error}") from None
    return [Entry(f"row {number}", number, row) for number, row in enumerate(rows, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawChat:
    """A chat in OpenAI form. `task` groups chats in tables; `ignored`: columns of its entry that teach nothing."""

    messages: list[Any]
    tools: list[Any]
    task: str
    ignored: frozenset[str]


def chat_of(value: Any, folder: Path) -> RawChat:
    """The chat of an entry; paths of images are seen from `folder`.

    Raises:
        PromptError: it holds no chat, or marks and images do not go together.
    """
    if not isinstance(value, dict):
        raise PromptError('an entry must be an object with a list "messages"')
    used = {"tools", "system", *_IMAGES}
    messages = _messages(value, used)
    if isinstance(value.get("system"), str) and value["system"]:
        messages = [{"role": "system", "content": value["system"]}, *messages]
    images = [image for name in _IMAGES for image in _listed(value.get(name))]
    messages = _placed([_openai(message) for message in messages], [_source(one, folder) for one in images])
    tools = value.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = parse_json_text(tools)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"tools is a text that is not JSON: {error}") from None
    given = {name for name, part in value.items() if part not in (None, "", [], {})}
    return RawChat(
        messages=[_with_paths(message, folder) for message in messages],
        tools=tools,
        task=next((value[name] for name in _TASKS if isinstance(value.get(name), str)), "all"),
        ignored=frozenset(given - used),
    )


def expected_answer(messages: Sequence[Any], tools: Sequence[Any]) -> str:
    """The last answer of a chat, which what a model says can be compared with.

    Raises:
        PromptError: it is no answer to a question, or not of text alone.
    """
    last = messages[-1] if len(messages) > 1 else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise PromptError("the last message must be the assistant's, behind a question: it is the right answer")
    expected = last.get("content")
    if isinstance(expected, list):
        expected = "".join(part.get("text") or "" for part in expected if isinstance(part, Mapping))
    if tools or last.get("tool_calls") or not isinstance(expected, str) or not expected.strip():
        raise PromptError("only answers of text can be compared: no tools, no calls, and not an empty one")
    return expected


def _messages(value: Mapping[str, Any], used: set[str]) -> list[Any]:
    """What is said, in any of the shapes; names that were read are added to `used`."""
    for name in _CHATS:
        if isinstance(value.get(name), list):
            used.add(name)
            return value[name]
    for asked, answered in _PAIRS:
        question, answer = value.get(asked), value.get(answered)
        if question is None or answer is None:
            continue
        used |= {asked, answered, "history", "input"}
        if isinstance(question, list) and isinstance(answer, list):  # both are messages
            return [*question, *answer]
        if isinstance(value.get("input"), str) and value["input"]:
            question = f"{question}\n{value['input']}"
        turns = [*(value.get("history") or []), [question, answer]]
        if all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
            return [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
    shapes = ", ".join([*_CHATS, *(" and ".join(pair) for pair in _PAIRS)])
    raise PromptError(f'an entry must be an object with a list "messages"; read are too: {shapes}')


def _openai(message: Any) -> Any:
    """A message of from and value as one of role and content; others stay."""
    if not isinstance(message, dict) or "from" not in message:
        return message
    who = message["from"]
    if who not in _ROLES:
        raise PromptError(f"a message is from {str(who)[:40]!r}; known are {', '.join(_ROLES)}")
    rest = {name: part for name, part in message.items() if name not in ("from", "value")}
    text = message.get("value")
    if who == "function_call" and isinstance(text, str):
        try:
            call = parse_json_text(text)
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            raise PromptError("a message from function_call is no JSON object with name and arguments") from None
        return {"role": "assistant", "tool_calls": [{"id": "call", "type": "function", "function": function}], **rest}
    if _ROLES[who] == "tool":
        return {"role": "tool", "tool_call_id": "call", "content": text, **rest}
    return {"role": _ROLES[who], "content": text, **rest}


def _placed(messages: Sequence[Any], images: Sequence[dict[str, Any]]) -> list[Any]:
    """Messages with an image for each mark `<image>` and each part `{"type": "image"}` without one, in order.

    Images without any mark stand before the text of the first question.
    """
    left, marks = iter(images), sum(map(_marks, messages))
    if marks == 0 and images:
        first = next((n for n, m in enumerate(messages) if isinstance(m, dict) and m.get("role") == "user"), None)
        if first is None:
            raise PromptError("there are images and no message of the user to show them in")
        asked = {**messages[first], "content": [*images, *_parts(messages[first].get("content"))]}
        return [*messages[:first], asked, *messages[first + 1 :]]
    if marks != len(images):
        raise PromptError(
            f"there are {marks} marks for images ({_MARK} in a text, or a part of type image without one) and "
            f'{len(images)} images; list them in order in a column "images"'
        )
    return [_filled(message, left) for message in messages]


def _marks(message: Any) -> int:
    content = message.get("content") if isinstance(message, dict) else None
    parts = [part for part in _parts(content) if isinstance(part, dict)]
    return sum(_is_mark(part) or str(part.get("text", "")).count(_MARK) for part in parts)


def _is_mark(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and _own_source(part) is None


def _filled(message: Any, left: Iterator[dict[str, Any]]) -> Any:
    if not _marks(message):
        return message
    parts: list[Any] = []
    for part in _parts(message["content"]):
        if _is_mark(part):
            parts.append(next(left))
        elif isinstance(part, dict) and _MARK in str(part.get("text", "")):
            for number, text in enumerate(part["text"].split(_MARK)):
                parts += [*([next(left)] if number else []), *([{**part, "text": text}] if text else [])]
        else:
            parts.append(part)
    return {**message, "content": parts}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _listed(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _source(image: Any, folder: Path) -> dict[str, Any]:
    """A part that shows an image of a column: a path, a data URL, bytes, or an object with one of them."""
    found = _own_source(image) if isinstance(image, dict) else image
    if not isinstance(found, str | bytes):
        expected = "a path, a data URL, or an object with bytes or path"
        raise PromptError(f"an image is {str(image)[:60]!r}; it may be {expected}")
    return _with_path({"type": "image_url", "image_url": {"url": found}}, folder)


def _own_source(part: Mapping[str, Any]) -> Any:
    """What a part or an object of other trainers has as its image."""
    return next((part[name] for name in ("bytes", "image", "path", "url", "image_url") if part.get(name)), None)


def _with_paths(message: Any, folder: Path) -> Any:
    """The message with image paths, which a file may hold and a request may not, as `Path`s seen from `folder`."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_with_path(part, folder) for part in content]}


def _with_path(part: Any, folder: Path) -> Any:
    if isinstance(part, dict) and part.get("type") == "image":
        return _source(_own_source(part), folder)
    url = part.get("image_url") if isinstance(part, dict) else None
    source = url.get("url") if isinstance(url, dict) else url
    if not isinstance(source, str) or is_data_url(source):
        return part
    if "://" in source and not source.startswith("file://"):
        raise PromptError(f"{source[:60]!r} is not a file; images are not fetched, save it and name its path")
    return {**part, "image_url": {"url": folder / source.removeprefix("file://")}}
