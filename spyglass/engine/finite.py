"""Whether a JSON schema has a finite value at all: what it requires must not refer to itself without end.

`llguidance` finds most contradictions when it compiles; this one it follows for ever. The finite schemas are the least
set that is closed under: a value without parts; an object all of whose required properties are finite; a list all of
whose required items are; one of `anyOf` and `oneOf`, all of `allOf`, what `$ref` names. Whatever else a schema says may
only be more than this: a schema without a finite value may pass, one that has one is never refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

_NESTED = ("object", "array")


def has_finite_value(schema: Any) -> bool:
    """Whether a value could end, as far as properties, items, alternatives and local references say."""
    known: dict[str, bool] = {}  # references, and whether what they name has been seen to be finite
    while not _is_finite(schema, known):
        before = dict(known)
        for pointer in before:
            known[pointer] = known[pointer] or _is_finite(_target(schema, pointer), known)
        if known == before:
            return False
    return True


def _is_finite(schema: Any, known: dict[str, bool]) -> bool:
    if not isinstance(schema, Mapping):
        return schema is not False
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and not known.setdefault(pointer, False):
        return False
    if not _alternatives_are_finite(schema, known):
        return False
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if (
        "enum" in schema
        or "const" in schema
        or not isinstance(kinds, list)
        or any(kind not in _NESTED for kind in kinds)
    ):
        return True
    return ("object" in kinds and _object_is_finite(schema, known)) or (
        "array" in kinds and _list_is_finite(schema, known)
    )


def _alternatives_are_finite(schema: Mapping[str, Any], known: dict[str, bool]) -> bool:
    options = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    parts = schema.get("allOf")
    return all(any(_is_finite(one, known) for one in each) for each in options) and (
        not isinstance(parts, list) or all(_is_finite(one, known) for one in parts)
    )


def _object_is_finite(schema: Mapping[str, Any], known: dict[str, bool]) -> bool:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return True
    others = schema.get("additionalProperties", True)
    return all(_is_finite(properties.get(name, others), known) for name in required if isinstance(name, str))


def _list_is_finite(schema: Mapping[str, Any], known: dict[str, bool]) -> bool:
    least, first, others = schema.get("minItems", 0), schema.get("prefixItems", []), schema.get("items", True)
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    items = first[:least] + [others] * (least > len(first))
    return all(_is_finite(item, known) for item in items)


def _target(root: Any, pointer: str) -> Any:
    """What a local reference names; anything goes (True) where it names nothing that can be followed here."""
    if not pointer.startswith("#"):
        return True
    for name in pointer[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, Mapping) and name in root:
            root = root[name]
        else:
            return True
    return root if pointer == "#" or pointer.startswith("#/") else True
