"""The grammar of calls that must be made: exactly the sound ones are sentences of it, whatever a model would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.llm import LLM
from spyglass.engine.request import Structured
from spyglass.engine.structured.grammar import GrammarCompiler
from spyglass.server.protocols.tags import DSML
from spyglass.server.protocols.tool_grammar import calls_grammar

LOOK: Any = {
    "type": "object",
    "properties": {
        "where": {"type": "string"},
        "mode": {"type": "string", "enum": ["near", "far"]},
        "zoom": {"description": "how near", "$ref": "#/$defs/zoom"},
        "note": {"type": "string"},
    },
    "required": ["mode", "zoom"],
    "$defs": {"zoom": {"type": "integer", "minimum": 1}},
}
TOOLS: Any = {"look": LOOK, "stop": {"type": "object", "properties": {}}}
WHERE = '<M_parameter name="where" string="true">left</M_parameter>\n'
MODE = '<M_parameter name="mode" string="true">far</M_parameter>\n'
ZOOM = '<M_parameter name="zoom" string="false">3</M_parameter>\n'
NOTE = '<M_parameter name="note" string="true">a <b> "c"\n</M_parameter>\n'


def call(*parameters: str, tool: str = "look") -> str:
    return f'<M_invoke name="{tool}">\n{"".join(parameters)}</M_invoke>\n'


STOP = call(tool="stop")
END = {"deepseek_v4": "</M_tool_calls>", "deepseek_v41": "</M_calls>"}
Accepts = Callable[..., bool]


@pytest.fixture(scope="module", params=sorted(END))
def accepts(request: pytest.FixtureRequest, llm: LLM) -> Accepts:
    """Whether a text is a whole sentence; in it M_ stands for the family's mark, and the block is closed behind it."""
    tokenizer, family = llm.tokenizer, request.param
    assert tokenizer is not None
    mark, forms = tokenizer.special_id(DSML), GrammarCompiler(TokenBytes(tokenizer), llm.config, cpu_seconds=600)
    assert mark is not None

    def accepts(text: str, *, closed: bool = True, tools: Any = TOOLS, one_call: bool = False, **more: Any) -> bool:
        grammar = calls_grammar(family, tools, mark, one_call=one_call, **more)
        matcher = forms.begin(Structured(kind="grammar", value=grammar)).library
        first, *rest = (text + END[family] * closed).split("M_")
        ids = tokenizer.encode_text(first)
        for piece in rest:
            ids += [mark, *tokenizer.encode_text((" " if family == "deepseek_v41" else "") + piece)]
        return bool(
            matcher.validate_tokens(ids) == len(ids) and matcher.try_consume_tokens(ids) and matcher.is_accepting()
        )

    return accepts


def test_a_call_has_its_required_parameters_in_their_order_and_may_have_the_others(accepts: Accepts) -> None:
    for sound in (
        call(MODE, ZOOM),
        call(WHERE, MODE, ZOOM),
        call(MODE, ZOOM, NOTE),
        call(WHERE, MODE, ZOOM, NOTE),
        STOP,
    ):
        assert accepts(sound)
    for missing in (call(), call(MODE), call(ZOOM), call(WHERE, NOTE), call(WHERE, MODE, NOTE)):
        assert not accepts(missing)
    for wrong in (call(ZOOM, MODE), call(MODE, MODE, ZOOM), call(MODE, ZOOM, tool="stop"), call(tool="jump")):
        assert not accepts(wrong)


def test_values_are_those_of_their_schema_and_written_as_their_type_is(accepts: Accepts) -> None:
    assert not accepts(call(MODE.replace("far", "away"), ZOOM)), "outside the enum"
    assert not accepts(call(MODE, ZOOM.replace("3", "0"))), "less than the minimum that $defs says"
    assert not accepts(call(MODE, ZOOM.replace("3", '"3"'))), "no integer"
    assert not accepts(call(MODE, ZOOM.replace("false", "true"))), "an integer as text"
    assert not accepts(call(MODE.replace("true", "false").replace("far", '"far"'), ZOOM)), "text as JSON"


def test_an_enum_lists_text_and_other_values_alike(accepts: Accepts) -> None:
    forms = {
        value: f'<M_parameter name="x" string="{kind}">{value}</M_parameter>\n'
        for kind, value in (("true", "a"), ("false", "1"))
    }
    for values, fit in ((["a"], {"a"}), ([1], {"1"}), (["a", 1], {"a", "1"}), (["b", 1], {"1"})):
        for extra in ({}, {"type": ["string", "integer"]}):
            tools = {"look": {"properties": {"x": {"enum": values, **extra}}}}
            assert {value for value, form in forms.items() if accepts(call(form), tools=tools)} == fit


def test_what_may_be_text_or_not_is_written_in_either_way(accepts: Accepts) -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    for schema in ({"type": ["string", "null"]}, {"title": "x"}, True, either):
        tools = {"look": {"properties": {"x": schema}}}
        assert accepts(call('<M_parameter name="x" string="true">null</M_parameter>\n'), tools=tools)
        assert accepts(call('<M_parameter name="x" string="false">null</M_parameter>\n'), tools=tools)


def test_no_value_goes_on_behind_a_mark_nor_spells_one(accepts: Accepts) -> None:
    """A value with a mark in it, as one token or spelled in pieces, would be read as if it ended there."""
    assert accepts(call(MODE, ZOOM, NOTE.replace("c", f"</ {DSML[1:]}")))
    assert not accepts(call(MODE, ZOOM, NOTE.replace("c", "</M_x")))
    assert not accepts(call(MODE, ZOOM, NOTE.replace("c", f"</{DSML}x")))


def test_there_is_one_call_at_least_and_more_only_where_they_are_allowed(accepts: Accepts) -> None:
    assert not accepts("") and not accepts("", one_call=True)
    assert accepts(STOP, one_call=True) and not accepts(STOP + STOP, one_call=True)
    assert accepts(STOP + call(MODE, ZOOM) + STOP)
    assert not accepts(STOP, closed=False), "a block that is not closed"


def test_a_block_that_is_not_open_comes_first_and_once(accepts: Accepts) -> None:
    """Behind reasoning, where the prompt cannot have opened it."""
    blocks = [f"\n\n<M_{name}>\n{STOP}" for name in ("tool_calls", "calls")]
    assert sum(accepts(block, opened=False) for block in blocks) == 1
    for text in (STOP, "\n\n" + STOP, "Well.", blocks[0] + blocks[1]):
        assert not accepts(text, opened=False)


def test_an_answer_by_schema_may_stand_in_place_of_calls_and_not_beside_them(accepts: Accepts) -> None:
    answer = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert accepts('{"n": 3}', closed=False, opened=False, answer=answer)
    assert not accepts('{"n": "3"}', closed=False, opened=False, answer=answer)
    assert not accepts('{"n": 3}' + STOP, opened=False, answer=answer) and not accepts(
        STOP, opened=False, answer=answer
    )
    blocks = [f"\n\n<M_{name}>\n{STOP}" for name in ("tool_calls", "calls")]
    assert sum(accepts(block, opened=False, answer=answer) for block in blocks) == 1, "opened by the family's own tag"


def test_a_block_that_is_not_open_is_opened_by_its_familys_tag_first(accepts: Accepts) -> None:
    blocks = [f"\n\n<M_{name}>\n{STOP}" for name in ("tool_calls", "calls")]
    assert sum(accepts(block, opened=False) for block in blocks) == 1
    assert not accepts(STOP, opened=False) and not any(accepts(block) for block in blocks)


TEXT_FORMS = {
    "date": (
        ["2026-12-01", "2024-02-29", "0001-01-31", "2000-02-29"],
        ["2026-02-29", "1900-02-29", "2026-13-01", "0000-01-01", "today"],
    ),
    "date-time": (["2026-12-01T05:30:00Z", "2026-12-01T05:30:00.25+02:00"], ["2026-12-01", "2026-12-01T25:00:00Z"]),
    "time": (["05:30:00Z"], ["5:30"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    "ipv4": (["192.168.0.1"], ["192.168.0.256", "1.2.3"]),
    "colour": (["anything"], []),
}


@pytest.mark.parametrize("form", TEXT_FORMS)
def test_b1_a_text_with_a_format_has_it(form: str, accepts: Accepts) -> None:
    tools = {"at": {"properties": {"when": {"type": "string", "format": form}}, "required": ["when"]}}
    for texts, sound in zip(TEXT_FORMS[form], (True, False), strict=True):
        for text in texts:
            said = call(f'<M_parameter name="when" string="true">{text}</M_parameter>\n', tool="at")
            assert accepts(said, tools=tools) == sound, text
