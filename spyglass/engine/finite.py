"""Whether a JSON schema has a finite value at all: what it requires must not refer to itself without end.

`llguidance` finds most contradictions when it compiles; this one it follows for ever. The finite schemas are the least
set that is closed under: a value without parts; an object all of whose required properties are finite; a list all of
whose required items are; one of `anyOf` and `oneOf`, all of `allOf`, what `$ref` names. Whatever else a schema says may
only be more than this: a schema without a finite value may pass, one that has one is never refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any
from urllib.parse import unquote

_NESTED = ("object", "array")


def has_finite_value(schema: Any) -> bool:
    """Whether a value could end, as far as properties, items, alternatives and local references say."""
    finite: set[str] = set()  # references that are seen to name such a schema
    waiting: dict[str, set[str]] = {}  # by reference, those that were not finite without it
    queue = {"#": None}  # in order, each once: a schema is looked at again only when one that it needs has changed
    while queue and "#" not in finite:
        pointer = next(iter(queue))
        del queue[pointer]
        missing: set[str] = set()
        if _is_finite(_target(schema, pointer), finite, missing):
            finite.add(pointer)
            queue |= dict.fromkeys(waiting.pop(pointer, ()))
        else:
            queue |= dict.fromkeys(missing - waiting.keys())
            for other in missing:
                waiting.setdefault(other, set()).add(pointer)
    return "#" in finite


def _is_finite(schema: Any, finite: Set[str], missing: set[str]) -> bool:
    """Whether a value ends if only the references `finite` do; others that it met come into `missing`."""
    if not isinstance(schema, Mapping):
        return schema is not False
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer not in finite:
        missing.add(pointer)
        return False
    if not _alternatives_are_finite(schema, finite, missing):
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
    return ("object" in kinds and _object_is_finite(schema, finite, missing)) or (
        "array" in kinds and _list_is_finite(schema, finite, missing)
    )


def _any(schemas: Iterable[Any], finite: Set[str], missing: set[str]) -> bool:
    ends = [_is_finite(one, finite, missing) for one in schemas]  # all are looked at: each tells what is missing
    return any(ends)


def _all(schemas: Iterable[Any], finite: Set[str], missing: set[str]) -> bool:
    ends = [_is_finite(one, finite, missing) for one in schemas]
    return all(ends)


def _alternatives_are_finite(schema: Mapping[str, Any], finite: Set[str], missing: set[str]) -> bool:
    options = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    parts = schema.get("allOf")
    ends = [_any(each, finite, missing) for each in options]
    return all(ends) and (not isinstance(parts, list) or _all(parts, finite, missing))


def _object_is_finite(schema: Mapping[str, Any], finite: Set[str], missing: set[str]) -> bool:
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return True
    names = [name for name in required if isinstance(name, str)]
    patterns = schema.get("patternProperties", {})
    others = [schema.get("additionalProperties", True), *(patterns.values() if isinstance(patterns, Mapping) else ())]
    return _all([properties[name] for name in names if name in properties], finite, missing) and (
        properties.keys() >= set(names) or _any(others, finite, missing)
    )


def _list_is_finite(schema: Mapping[str, Any], finite: Set[str], missing: set[str]) -> bool:
    least, first, others = schema.get("minItems", 0), schema.get("prefixItems", []), schema.get("items", True)
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    return _all(first[:least] + [others] * (least > len(first)), finite, missing)


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
