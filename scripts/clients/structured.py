"""instructor and pydantic-ai against a server: classes with an enum, nested classes and dates come back as such.

    pip install instructor 'pydantic-ai-slim[openai]'
    spyglass serve spyglass-tiny-v4 &
    python -m scripts.clients.structured http://127.0.0.1:8000

What a small model writes into the fields is noise; that every answer is a value of its class is what counts. The exit
code is the number of calls that failed. `Mode.JSON` of instructor asks for any object, which only a model with sense
can fill.
"""

from __future__ import annotations

import datetime
import enum
import sys
import urllib.request
from collections.abc import Callable
from json import loads
from typing import Annotated, Any

import instructor
import openai
import pydantic
import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "Answer with a small example."


Place = Annotated[int, pydantic.Field(ge=0, le=99)]  # a model without sense writes digits for ever


class Colour(enum.Enum):
    """One of three."""

    RED, GREEN, BLUE = "red", "green", "blue"


class Closed(pydantic.BaseModel):
    """Without other fields, as OpenAI's own clients ask for; a model without sense would invent them for ever."""

    model_config = pydantic.ConfigDict(extra="forbid")


class Spot(Closed):
    """Nested."""

    colour: Colour
    at: tuple[Place, Place]


class Scene(Closed):
    """All that the reports were about: an enum, nested classes in a list, optional fields."""

    main: Spot
    others: list[Spot] = pydantic.Field(max_length=2)
    sure: bool | None


class Visit(Closed):
    """Formats."""

    day: datetime.date
    seen: datetime.datetime


def calls(url: str, model: str) -> dict[str, Callable[[], Any]]:
    """Each call by name; what it gives must be an instance of the class in its name."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    found: dict[str, Callable[[], Any]] = {}
    messages: Any = [{"role": "user", "content": ASK}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        for kind in (Scene, Visit):
            patched = instructor.from_openai(client, mode=mode)
            found[f"instructor {mode.name} {kind.__name__}"] = lambda patched=patched, kind=kind: (
                patched.chat.completions.create(
                    model=model, messages=messages, response_model=kind, max_retries=0, max_tokens=400, temperature=0
                )
            )
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = pydantic_ai.ModelSettings(max_tokens=400, temperature=0)
    for name, shape in (("tool", pydantic_ai.ToolOutput), ("native", pydantic_ai.NativeOutput)):
        for api in (OpenAIChatModel, OpenAIResponsesModel):
            for kind in (Scene, Visit):
                agent = pydantic_ai.Agent(
                    api(model, provider=provider), output_type=shape(kind), model_settings=settings, retries=0
                )
                found[f"pydantic-ai {api.__name__} {name} {kind.__name__}"] = lambda agent=agent: (
                    agent.run_sync(ASK).output
                )
    found["openai parse Scene"] = lambda: (
        client.chat.completions.parse(
            model=model, messages=messages, response_format=Scene, max_tokens=400, temperature=0
        )
        .choices[0]
        .message.parsed
    )
    return found


def main() -> int:
    """Run every call and print what came of it."""
    url = sys.argv[1].rstrip("/")
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = loads(answer.read())["data"][0]["id"]
    failed = 0
    for name, call in calls(url, model).items():
        try:
            value = call()
            sound = type(value).__name__ == name.split()[-1]
            print("ok  " if sound else "FAIL", name, repr(value)[:120], flush=True)
        except Exception as error:
            sound = False
            print("FAIL", name, type(error).__name__, str(error)[:300].replace("\n", " "), flush=True)
        failed += not sound
    return failed


if __name__ == "__main__":
    sys.exit(main())
