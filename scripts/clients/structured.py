"""instructor and pydantic-ai against a server: classes with an enum, nested classes and dates come back as such.

    pip install instructor 'pydantic-ai-slim[openai]'
    spyglass serve spyglass-tiny-v4 &
    python -m scripts.clients.structured http://127.0.0.1:8000

What a small model writes into the fields is noise; that every answer is a value of its class is what counts. The exit
code is the number of calls that failed. instructor's `Mode.JSON` asks for any object and says in the prompt which; a
model without sense leaves it empty, which is right for a class whose fields all have defaults.
"""

from __future__ import annotations

import datetime
import enum
import sys
from collections.abc import Callable
from typing import Annotated, Any

import instructor
import openai
import pydantic
import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from scripts.clients.calls import run


def is_sound(name: str, value: Any) -> bool:
    """Whether what came is an instance of the class that the call is named after."""
    return type(value).__name__ == name.split()[-1]


ASK = "Answer with a small example."
Place = Annotated[int, pydantic.Field(ge=0, le=99)]  # a model without sense writes digits for ever


class Colour(enum.Enum):
    """One of three."""

    RED, GREEN, BLUE = "red", "green", "blue"


class Spot(pydantic.BaseModel):
    """Nested."""

    colour: Colour
    at: tuple[Place, Place]


class Scene(pydantic.BaseModel):
    """All that the reports were about: an enum, nested classes in a list, optional fields."""

    main: Spot
    others: list[Spot] = pydantic.Field(max_length=2)
    sure: bool | None


class Visit(pydantic.BaseModel):
    """Formats."""

    day: datetime.date
    seen: datetime.datetime


class Note(pydantic.BaseModel):
    """All defaults, for modes that only ask for an object."""

    text: str | None = None


MODES = {
    instructor.Mode.TOOLS: (Scene, Visit),
    instructor.Mode.TOOLS_STRICT: (Scene, Visit),
    instructor.Mode.JSON_SCHEMA: (Scene, Visit),
    instructor.Mode.JSON: (Note,),
    instructor.Mode.RESPONSES_TOOLS: (Scene, Visit),
}


def calls(url: str, model: str) -> dict[str, Callable[[], Any]]:
    """Each call by name; what it gives must be an instance of the class in its name."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
    found: dict[str, Callable[[], Any]] = {}
    messages: Any = [{"role": "user", "content": ASK}]
    for mode, kinds in MODES.items():
        limit = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
        asked: dict[str, Any] = {"model": model, "messages": messages, "max_retries": 0, "temperature": 0, limit: 400}
        for kind in kinds:
            patched = instructor.from_openai(client, mode=mode)
            found[f"instructor {mode.name} {kind.__name__}"] = lambda patched=patched, kind=kind, asked=asked: (
                patched.chat.completions.create(**asked, response_model=kind)
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


if __name__ == "__main__":
    sys.exit(run(lambda url, model: calls(url, model).items(), is_sound))
