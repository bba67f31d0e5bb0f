"""Schemas whose values cannot end: told from those whose values can, by an independent way of building one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams, Structured
from spyglass.engine.structured.schema_is_finite import schema_is_finite
from spyglass.errors import PromptError

LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
NAMES = ("a", "b", "c")


def defined(**schemas: Any) -> dict[str, Any]:
    return {"$ref": "#/$defs/a", "$defs": schemas}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        LOOP,
        {"anyOf": [LOOP, {"$ref": "#/anyOf/0"}]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["any"]},
        {"type": ["object", "array"], **{k: v for k, v in LOOP.items() if k != "type"}, "items": False, "minItems": 1},
        {"type": "object", "patternProperties": {"^a": LOOP}, "additionalProperties": False, "required": ["ab"]},
        {"allOf": [{}, {"$ref": "#"}]},
        {"oneOf": [{"$ref": "#"}]},
        defined(a={"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/a"}),
        defined(a={"$ref": "#/%24defs/x~1y~0"}, **{"x/y~": {"$ref": "#/$defs/a"}}),
    ],
)
def test_what_requires_itself_has_no_value_that_ends(schema: Any) -> None:
    assert not schema_is_finite(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {**LOOP, "const": {}},
        {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False, "required": ["ab"]},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#anchor"},
        {"$ref": "#/nowhere/0"},
        {"type": 5, "required": 7, "properties": [], "minItems": "x", "items": [], "prefixItems": {}},
        {"type": [{}], "required": [[]], "anyOf": 3, "allOf": {}},
        defined(a={"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 1}, b={"$ref": "#/$defs/c"}, c={}),
    ],
)
def test_everything_else_may_pass(schema: Any) -> None:
    assert schema_is_finite(schema)


@pytest.mark.parametrize("last", [True, False])
def test_a_chain_of_references_is_followed_link_by_link_and_not_all_anew_for_each(last: bool) -> None:
    chain = {str(link): {"$ref": f"#/$defs/{link + 1}"} for link in range(4000)}
    assert schema_is_finite({"$ref": "#/$defs/0", "$defs": {**chain, "4000": last}}) is last


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("kind", ["allOf", "anyOf"])
def test_many_references_in_one_place_are_each_followed_once(kind: str, last: bool) -> None:
    links = 20_000
    chain = {str(link): {"$ref": f"#/$defs/{link + 1}"} for link in range(links)}
    schema = {kind: [{"$ref": f"#/$defs/{link}"} for link in range(links)], "$defs": {**chain, str(links): last}}
    assert schema_is_finite(schema) is last


def test_an_index_of_thousands_of_digits_names_nothing() -> None:
    assert schema_is_finite({"$ref": f"#/$defs/{'9' * 5000}", "$defs": [False]})


REFERENCES = st.sampled_from(NAMES).map(lambda name: {"$ref": f"#/$defs/{name}"})
SCHEMAS = st.recursive(
    REFERENCES | st.just({"type": "null"}) | st.just(False),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some})
        | st.lists(inner, max_size=2).map(lambda some: {"allOf": some})
        | st.tuples(inner, st.sampled_from([[], ["p"]])).map(
            lambda pair: {"type": "object", "properties": {"p": pair[0]}, "required": pair[1]}
        )
        | st.tuples(inner, st.integers(0, 1)).map(lambda p: {"type": "array", "items": p[0], "minItems": p[1]})
    ),
    max_leaves=5,
)


def builds(schema: Any, definitions: dict[str, Any], steps: int) -> bool:
    """Whether a value can be written down within so many nested rules; the long way, by trying."""
    if not isinstance(schema, dict):
        return bool(schema)
    if steps == 0:
        return False
    if "$ref" in schema:
        return builds(definitions[schema["$ref"][-1]], definitions, steps - 1)
    if "anyOf" in schema:
        return any(builds(one, definitions, steps) for one in schema["anyOf"])
    if "allOf" in schema:
        return all(builds(one, definitions, steps) for one in schema["allOf"])
    if schema["type"] == "object":
        return not schema["required"] or builds(schema["properties"]["p"], definitions, steps)
    if schema["type"] == "array":
        return schema["minItems"] == 0 or builds(schema["items"], definitions, steps)
    return True


@given(schemas=st.tuples(*[SCHEMAS] * len(NAMES)))
def test_a_value_that_ends_exists_where_one_can_be_built_in_as_many_steps_as_there_are_names(
    schemas: tuple[Any, ...],
) -> None:
    """A shortest derivation never follows the same reference inside itself."""
    definitions = dict(zip(NAMES, schemas, strict=True))
    assert schema_is_finite(defined(**definitions)) == builds({"$ref": "#/$defs/a"}, definitions, len(NAMES) + 1)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, r"\$: "),
        ({"allOf": [{"$ref": "#"}]}, r"\$: "),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, r"\$\.\$defs\.a: "),
    ],
)
def test_a_schema_that_refers_only_to_itself_is_told_in_words(schema: Any, place: str, tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, device="cpu", images=0, max_sequences=1)
    with pytest.raises(PromptError, match=place + "it says nothing but that it is like itself"):
        llm.generate([[0]], SamplingParams(structured=Structured(kind="json_schema", value=schema)))
