"""Grammars compiled over a vocabulary of all bytes: which tokens may come next, and what is refused how."""

from __future__ import annotations

import json
import re
import string
import threading
from typing import Any

import llguidance
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from spyglass.engine.structured.compile import Words, compile_grammar, run_deep

SILENT = 257  # spelled like a word, and no way to spell it
WORDS = Words([bytes((byte,)) for byte in range(256)] + [b"ab", b"ab"], [SILENT], [SILENT])
VOCABULARY = WORDS.vocabulary()


def compiled(kind: str, value: Any, begun: str = "") -> llguidance.LLMatcher:
    matcher = compile_grammar(kind, value, VOCABULARY)
    for byte in begun.encode():
        assert matcher.consume_token(byte), matcher.get_error()
    return matcher


def allowed(matcher: llguidance.LLMatcher) -> set[int]:
    words_1W = allocate_token_bitmask(1, VOCABULARY.vocab_size)
    fill_next_token_bitmask(matcher, words_1W)
    return set(np.flatnonzero(np.unpackbits(words_1W.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("sign", string.printable, ids=ascii)
def test_a_choice_means_its_texts_letter_by_letter(sign: str) -> None:
    """Whatever a sign would mean in a pattern."""
    assert allowed(compiled("choice", [f"x{sign}y", "z"], begun="x")) == {ord(sign)}


def test_silent_tokens_are_no_way_to_spell_text() -> None:
    assert allowed(compiled("regex", "ab*")) == {ord("a"), WORDS.tokens.index(b"ab")}
    assert allowed(compiled("regex", "ab*", begun="abb")) == {ord("b"), SILENT}, "which may end it"


def test_any_json_is_an_object() -> None:
    assert {chr(token) for token in allowed(compiled("json", None))} == {"{"}


def test_a_pattern_is_no_grammar_and_a_grammar_no_pattern() -> None:
    assert allowed(compiled("regex", "start: a")) == {ord("s")}
    assert allowed(compiled("grammar", 'start: "a"')) == {ord("a")}


def test_text_that_a_form_leaves_no_choice_about_is_spelled_as_the_tokenizer_does() -> None:
    spelled = Words(WORDS.tokens, WORDS.silent, WORDS.ends, lambda text: [256] * text.count("ab"))
    assert spelled.vocabulary().tokenize_str("ab") == [256]
    assert VOCABULARY.tokenize_str("ab") == [ord("a"), ord("b")], "or in bytes"
    few = Words([b"a", b"b", b""], [2], [2])
    assert few.vocabulary().tokenize_str("abéb") == [0, 1], "as far as there are tokens of them"


@pytest.mark.parametrize(
    ("kind", "value"), [("regex", 3), ("choice", [3]), ("grammar", None), ("json_schema", object()), ("regex", "(a")]
)
def test_a_form_of_another_type_is_refused_by_its_kind(kind: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"the {kind} asked for cannot be"):
        compile_grammar(kind, value, VOCABULARY)


def test_a_refusal_is_as_short_as_a_person_reads() -> None:
    made_up = {f"p{number}": {"type": "string", "not": {"const": number}} for number in range(90)}
    schema = {"type": "object", "properties": made_up, "x-guidance": {"lenient": True}}
    with pytest.raises(ValueError, match=r"cannot be followed: \$\.properties\.p0: .*not") as caught:
        compile_grammar("json_schema", schema, VOCABULARY)
    assert len(str(caught.value)) < 600


def follows(schema: Any, text: str) -> bool:
    matcher = compile_grammar("json_schema", schema, VOCABULARY)
    tokens = list(text.encode())
    return bool(matcher.validate_tokens(tokens) == len(tokens))


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a":1,"b":["x"]}', True),
        ('{"a": 1, "b": ["x"]}', True),
        ('{\n  "a": 1,\n  "b": [\n    "x"\n  ]\n}', True),
        ('{  "a": 1}', False),
        ('{\n\n"a": 1}', False),
        ("{\n" + 41 * " ", False),
    ],
)
def test_white_space_between_the_tokens_of_json_is_bounded(text: str, fits: bool) -> None:
    """Else a model that has nothing to say writes blanks to its limit."""
    assert follows(PAIR, text) is fits
    if "b" not in text:
        assert follows({"type": "object"}, text) is fits


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "date-time"}, '"2024-01-01T00:00:00Z"', '"yesterday"'),
        ({"type": "string", "format": "password"}, '"x"', "5"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, '{"k":"v"}', '{"k":5}'),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", '["x"'),
        ({"oneOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}, '"x"', "1"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "4", "-1"),
        ({"properties": {"format": {"const": {"format": "zz"}}}, "type": "object"}, '{"format":{"format":"zz"}}',
         '{"format":{}}'),
    ],
)  # fmt: skip
def test_what_typed_libraries_ask_for_is_followed(schema: Any, good: str, bad: str) -> None:
    assert follows(schema, good) and not follows(schema, bad)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"items": {"type": "string", "pattern": "^(?!a)b$"}, "type": "array"}}},
         "$.properties.a.items: regex parse error: ^(?!a)b$ ^^^ error: look-around"),
        ({"anyOf": [{"type": "string"}, {"not": {"type": "string"}}]}, "$.anyOf[1]: Unimplemented keys"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}, "$defs": {}}, "$.properties.a: Pointer"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_named_by_its_place_with_the_whole_reason(schema: Any, place: str) -> None:
    with pytest.raises(ValueError, match=re.escape(place)):
        compile_grammar("json_schema", schema, VOCABULARY)


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
AGE = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        (NAMED, {"a": 1}, True),
        (NAMED, {"a": 1, "c": 2}, False),
        ({**NAMED, "additionalProperties": True}, {"a": 1, "c": 2}, True),
        ({**NAMED, "additionalProperties": {"type": "integer"}}, {"a": 1, "c": 2}, True),
        ({**NAMED, "required": ["a", "c"]}, {"a": 1, "c": 2}, True),
        ({"type": "object", "properties": {}}, {"c": 2}, True),
        ({"type": "array", "items": NAMED}, [{"a": 1, "c": 2}], False),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"a": 1, "c": 2}, False),
        ({"allOf": [NAMED, AGE]}, {"a": 1, "b": 2}, True),
        ({"allOf": [{"$ref": "#/$defs/N"}, AGE], "$defs": {"N": NAMED}}, {"a": 1, "b": 2}, True),
        ({"$ref": "#/$defs/N", "properties": AGE["properties"], "$defs": {"N": NAMED}}, {"a": 1, "b": 2}, True),
        ({"$ref": "#/$defs/N", "$defs": {"N": NAMED}}, {"a": 1, "b": 2}, False),
        ({"allOf": [{"$ref": "#/$defs/M"}, AGE], "$defs": {"M": {"$ref": "#/$defs/N"}, "N": NAMED}},
         {"a": 1, "b": 2}, True),
        ({**NAMED, "anyOf": [AGE, {"required": ["a"]}]}, {"a": 1, "b": 2}, True),
        ({"required": ["a", "b"], "anyOf": [NAMED, AGE]}, {"a": 1, "b": 2}, True),
    ],
)  # fmt: skip
def test_an_object_that_lists_its_properties_has_no_others_unless_something_says_so(
    schema: Any, value: Any, fits: bool
) -> None:
    """Else a model that has nothing to say invents properties to its limit."""
    assert follows(schema, json.dumps(value)) is fits


def test_a_schema_may_ask_for_json_without_blanks() -> None:
    compact = {**PAIR, "x-guidance": {"whitespace_flexible": False}}
    assert follows(compact, '{"a":1}') and not follows(compact, '{"a": 1}')


def test_only_the_thread_that_compiles_gets_a_deep_stack() -> None:
    before = threading.stack_size()
    assert run_deep(lambda: 5, threading.Lock()) == 5
    assert threading.stack_size() == before
