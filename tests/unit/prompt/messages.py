"""Messages, tools and renderings that the chat tests share."""

from __future__ import annotations

from typing import Any

from spyglass.config import ModelConfig
from spyglass.prompt import ChatOptions, ImageRef, render_chat
from tests.unit.prompt.test_data_url import SPELLINGS

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
PICTURE = {"type": "image_url", "image_url": {"url": SPELLINGS["plain"]}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "looks",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def rendered(messages: list[dict[str, Any]], config: ModelConfig, **options: Any) -> str:
    """The prompt as text, pictures shown as `#`."""
    pieces = render_chat(messages, config, ChatOptions(**options)).pieces
    return "".join(
        "#" if isinstance(piece, ImageRef) else piece if isinstance(piece, str) else piece.spelling for piece in pieces
    )


def tool(**function: object) -> dict[str, Any]:
    return {"type": "function", "function": {**TOOL["function"], **function}}  # type: ignore[dict-item]


def tool_turn(result: object, arguments: str = '{"place": "here"}') -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    turn = assistant(None, reasoning_content="r", tool_calls=[call])
    return [user("a"), turn, {"role": "tool", "tool_call_id": "c", "content": result}]
