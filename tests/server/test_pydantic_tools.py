"""Tools made of Pydantic classes with enums and nested classes (`$defs`), forced, strict, in every chat protocol."""

from __future__ import annotations

import enum
import functools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from spyglass.config.server import ServerConfig
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.llm import LLM
from spyglass.engine.structured.grammar import GrammarCompiler
from spyglass.server.app import create_app
from spyglass.server.parsing import prepared
from spyglass.server.protocols.tags import DSML
from tests.server.parts import Live, running
from tests.server.protocol_parts import FAMILIES, PROTOCOLS, ChatProtocol, Family, call_of, config_of, tokenizer_of
from tests.server.test_field_reports import chat, strict_tool


class Mode(enum.Enum):
    NEAR = "near"
    FAR = "far"


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inside: bool
    mode: Mode


class Look(BaseModel):
    """Look somewhere."""

    model_config = ConfigDict(extra="forbid")
    mode: Mode
    place: Place
    others: list[Place]
    last: Place | None


class Point(BaseModel):
    """Nothing in it has an end that a model of random weights would not find."""

    model_config = ConfigDict(extra="forbid")
    mode: Mode
    place: Place


STRICT: Any = openai.pydantic_function_tool(Look)["function"]
SOUND = {"inside": True, "mode": "far"}
FORCED: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "Look"}},
    "responses": {"type": "function", "name": "Look"},
    "messages": {"type": "tool", "name": "Look"},
}


def written(mode: str, place: Any, others: Any, last: Any, family: Family) -> list[int]:
    """Tokens of a call as the model writes it inside an open block."""
    tokenizer = tokenizer_of(family)
    mark = tokenizer.special_id(DSML)
    assert mark is not None
    values = [f'name="mode" string="true">{mode}']
    values += [
        f'name="{name}" string="false">{json.dumps(value)}'
        for name, value in (("place", place), ("others", others), ("last", last))
    ]
    lines = "".join(f"<M_parameter {value}</M_parameter>\n" for value in values)
    end = {"deepseek_v4": "</M_tool_calls>", "deepseek_v41": "</M_calls>"}[family]
    first, *rest = f'<M_invoke name="Look">\n{lines}</M_invoke>\n{end}'.split("M_")
    ids = tokenizer.encode_text(first)
    for piece in rest:
        ids += [mark, *tokenizer.encode_text((" " if family == "deepseek_v41" else "") + piece)]
    return ids


@functools.cache
def forms_of(family: Family) -> GrammarCompiler:
    return GrammarCompiler(TokenBytes(tokenizer_of(family)), config_of(family), cpu_seconds=600)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_forced_call_takes_what_the_class_takes_and_nothing_else(protocol: ChatProtocol, family: Family) -> None:
    call = call_of(protocol, family, tools={"Look": STRICT["parameters"]}, tool_choice=FORCED[protocol])
    structured = call.params[0].structured
    assert structured is not None
    forms = forms_of(family)
    cases: list[tuple[Any, Any, Any, Any]] = [
        ("near", SOUND, [], None),
        ("far", SOUND, [SOUND, SOUND], SOUND),
        ("away", SOUND, [], None),
        ("near", {**SOUND, "mode": "away"}, [], None),
        ("near", {"inside": True}, [], None),
        ("near", SOUND, [{**SOUND, "inside": 3}], None),
        ("near", SOUND, [], {"inside": True}),
        ("near", {**SOUND, "more": 1}, [], None),
    ]
    accepted = 0
    for mode, place, others, last in cases:
        ids = written(mode, place, others, last, family)
        matcher = forms.begin(structured).library
        fits = matcher.validate_tokens(ids) == len(ids)
        try:
            Look.model_validate({"mode": mode, "place": place, "others": others, "last": last}, strict=False)
        except ValidationError:
            assert not fits, (mode, place, others, last)
        else:
            assert fits, (mode, place, others, last)
            accepted += 1
    assert accepted == 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_prompt_shows_the_definitions_that_the_schema_refers_to(protocol: ChatProtocol, family: Family) -> None:
    call = call_of(protocol, family, tools={"Look": STRICT["parameters"]})
    shown = tokenizer_of(family).decode(call.prompt.ids_T.tolist())
    for name in ("Mode", "Place"):
        assert f'#/$defs/{name}"' in shown
    assert '"$defs"' in shown and '["near", "far"]' in shown.replace('","', '", "')


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Live]:
    with running(create_app(llm, ServerConfig(grace_seconds=1, model_name=("tiny",)))) as live:
        yield live


@pytest.mark.slow
def test_official_clients_get_the_class_back(served: Live) -> None:
    schema = openai.pydantic_function_tool(Point)
    said: Any = [{"role": "user", "content": "Where?"}]
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        chosen: Any = {"type": "function", "function": {"name": "Point"}}
        chat = client.chat.completions.parse(
            model="tiny", messages=said, tools=[schema], tool_choice=chosen, max_tokens=200, seed=1
        )
        (made, *_) = chat.choices[0].message.tool_calls or ()
        assert isinstance(made.function.parsed_arguments, Point)
        tool: Any = {"type": "function", **schema["function"]}
        response = client.responses.create(
            model="tiny", input=said, tools=[tool], tool_choice={"type": "function", "name": "Point"},
            max_output_tokens=200, extra_body={"seed": 1},
        )  # fmt: skip
        assert Point.model_validate_json(response.output[0].arguments)  # type: ignore[union-attr]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(
            model="tiny", messages=said, max_tokens=200, extra_body={"seed": 1},
            tools=[{"name": "Point", "input_schema": Point.model_json_schema()}],
            tool_choice={"type": "tool", "name": "Point"},
        )  # fmt: skip
        assert message.content[0].type == "tool_use" and Point.model_validate(message.content[0].input)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "additionalProperties": {"type": "string"}},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2},
        {"allOf": [{"type": "integer"}, {"minimum": 3}]},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "format": "int32"},
        {"type": "string", "format": "password"},
        {"type": "string", "format": "uri"},
    ],
    ids=["dict", "optional", "tuple", "allOf", "oneOf", "int32", "password", "uri"],
)
def test_b4_strict_takes_what_typed_libraries_write(schema: dict[str, Any], llm: LLM) -> None:
    whole = {"type": "object", "properties": {"value": schema}, "required": ["value"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": whole, "strict": True}}
    prepared(chat(response_format=form), llm.engine.prepare)
    for choice in ("auto", "required"):
        prepared(chat(tools=[strict_tool(whole)], tool_choice=choice), llm.engine.prepare)
