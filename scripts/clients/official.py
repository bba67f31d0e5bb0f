"""openai, anthropic and ollama against a server of a model that comes with the package: right answers about an image.

    pip install openai anthropic ollama
    spyglass serve spyglass-tiny-v4 &
    python -m scripts.clients.official http://127.0.0.1:8000

Each call shows `examples/shapes.jpg`, a red triangle among other things. A call for text must bring "triangle" back;
one for a form of answer one of the shapes, since the small models were not taught to answer in forms. The exit code is
the number of calls that failed.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import anthropic
import ollama
import openai
import pydantic

from scripts.clients.calls import run

PHOTO = Path(__file__).resolve().parents[2] / "examples" / "shapes.jpg"
QUESTION = "What shape is the red thing?"
Shape = Literal["circle", "square", "triangle", "star"]


class Found(pydantic.BaseModel):
    """What a call by schema must bring."""

    shape: Shape


PARAMETERS = Found.model_json_schema()
FORMS = ("parse", "tool", "format")


def is_sound(name: str, value: Any) -> bool:
    """Whether the answer to a call is right, as far as the model was taught."""
    shapes = get_args(Shape) if name.endswith(FORMS) else ("triangle",)
    return any(shape in repr(value) for shape in shapes)


def data() -> str:
    """The image as base64."""
    return base64.b64encode(PHOTO.read_bytes()).decode()


def of_openai(url: str, model: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Chat Completions, Responses and Completions."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    address = f"data:image/jpeg;base64,{data()}"
    parts: Any = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": address}}]
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0}
    items: Any = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": address}]
    asked: dict[str, Any] = {"model": model, "input": [{"role": "user", "content": items}], "temperature": 0}
    tool: Any = {"name": "tell", "description": "Tells a shape.", "parameters": PARAMETERS}
    yield "openai chat", lambda: client.chat.completions.create(**chat).choices[0].message.content
    yield (
        "openai chat stream",
        lambda: "".join(
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**chat, stream=True)
            if chunk.choices
        ),
    )
    yield (
        "openai chat parse",
        lambda: client.chat.completions.parse(**chat, response_format=Found).choices[0].message.parsed,
    )
    yield (
        "openai chat forced tool",
        lambda: (
            client.chat.completions.create(
                **chat, tools=[{"type": "function", "function": tool}], tool_choice="required"
            )
            .choices[0]
            .message.tool_calls
        ),
    )
    yield "openai responses", lambda: client.responses.create(**asked).output_text
    yield "openai responses stream", lambda: _streamed(client, asked)
    yield "openai responses parse", lambda: client.responses.parse(**asked, text_format=Found).output_parsed
    yield (
        "openai responses forced tool",
        lambda: client.responses.create(**asked, tools=[{"type": "function", **tool}], tool_choice="required").output,
    )


def _streamed(client: openai.OpenAI, asked: dict[str, Any]) -> str:
    with client.responses.stream(**asked) as stream:
        return stream.get_final_response().output_text


def of_anthropic(url: str, model: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Messages."""
    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=300)
    source = {"type": "base64", "media_type": "image/jpeg", "data": data()}
    content: Any = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    asked: dict[str, Any] = {"model": model, "max_tokens": 64, "messages": [{"role": "user", "content": content}]}
    tool: Any = {"name": "tell", "description": "Tells a shape.", "input_schema": PARAMETERS}

    def streamed() -> str:
        with client.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            return stream.get_final_text()

    yield "anthropic messages", lambda: client.messages.create(**asked, extra_body={"temperature": 0}).content
    yield "anthropic stream", streamed
    yield (
        "anthropic forced tool",
        lambda: client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"}).content,
    )


def of_ollama(url: str, model: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Chat, generate and structured output of Ollama."""
    client = ollama.Client(host=url, timeout=300)
    asked = [{"role": "user", "content": QUESTION, "images": [str(PHOTO)]}]
    options = {"temperature": 0, "num_predict": 64}
    yield "ollama chat", lambda: client.chat(model, asked, options=options).message.content
    yield (
        "ollama chat stream",
        lambda: "".join(part.message.content or "" for part in client.chat(model, asked, options=options, stream=True)),
    )
    yield (
        "ollama generate",
        lambda: client.generate(model, QUESTION, images=[str(PHOTO)], options=options).response,
    )
    yield (
        "ollama format",
        lambda: Found.model_validate_json(
            client.chat(model, asked, options=options, format=Found.model_json_schema()).message.content or ""
        ),
    )


def calls(url: str, model: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All of them."""
    yield from of_openai(url, model)
    yield from of_anthropic(url, model)
    yield from of_ollama(url, model)


if __name__ == "__main__":
    sys.exit(run(calls, is_sound))
