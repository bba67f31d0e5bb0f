"""Whether a JSON schema has a finite value at all: what it requires must not refer to itself without end.

`llguidance` finds most contradictions when it compiles; this one it follows for ever. The finite schemas are the least
set that is closed under: a value without parts; an object all of whose required properties are finite; a list all of
whose required items are; one of `anyOf` and `oneOf`, all of `allOf`, what `$ref` names. Whatever else a schema says may
only be more than this: a schema without a finite value may pass, one that has one is never refused.

Every part of a schema is looked at once. It counts those of its own parts that must end first, and tells what it is
part of when it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

_NESTED = ("object", "array")
_INDEX_DIGITS = 9


def schema_is_finite(schema: Any) -> bool:
    """Whether a value could end, as far as properties, items, alternatives and local references say."""
    return _Parts(schema).end()


class _Part:
    """Something that ends when `missing` of those that name it as one of `wholes` do."""

    __slots__ = ("missing", "wholes")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.wholes: list[_Part] = []


class _Parts:
    """What the values of one schema are made of."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._ready: list[_Part] = []  # those that need nothing
        self._named: dict[str, _Part] = {}  # by reference
        self._unread: list[str] = []  # references whose schemas have not been looked at
        self._read: dict[int, _Part] = {}  # by the identity of a schema, which one reference may find inside another's

    def end(self) -> bool:
        whole = self._reference("#")
        while self._unread:
            pointer = self._unread.pop()
            self._schema(_target(self._root, pointer)).wholes.append(self._named[pointer])
        while self._ready:
            for other in self._ready.pop().wholes:
                other.missing -= 1
                if other.missing == 0:
                    self._ready.append(other)
        return whole.missing <= 0

    def _all(self, parts: Sequence[_Part]) -> _Part:
        return self._some(len(parts), parts)

    def _any(self, parts: Sequence[_Part]) -> _Part:
        return self._some(1, parts)

    def _some(self, missing: int, parts: Sequence[_Part]) -> _Part:
        whole = _Part(missing)
        for part in parts:
            part.wholes.append(whole)
        if missing == 0:
            self._ready.append(whole)
        return whole

    def _reference(self, pointer: str) -> _Part:
        if pointer not in self._named:
            self._named[pointer] = _Part(1)
            self._unread.append(pointer)
        return self._named[pointer]

    def _schema(self, schema: Any) -> _Part:
        if not isinstance(schema, Mapping):
            return self._any([]) if schema is False else self._all([])
        if id(schema) not in self._read:
            self._read[id(schema)] = self._all(
                [*self._referred(schema), *self._alternatives(schema), *self._own(schema)]
            )
        return self._read[id(schema)]

    def _schemas(self, schemas: Sequence[Any]) -> list[_Part]:
        return [self._schema(one) for one in schemas]

    def _referred(self, schema: Mapping[str, Any]) -> list[_Part]:
        pointer = schema.get("$ref")
        return [self._reference(pointer)] if isinstance(pointer, str) else []

    def _alternatives(self, schema: Mapping[str, Any]) -> list[_Part]:
        options = [schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
        parts = schema.get("allOf")
        return [self._any(self._schemas(each)) for each in options] + self._schemas(
            parts if isinstance(parts, list) else []
        )

    def _own(self, schema: Mapping[str, Any]) -> list[_Part]:
        """What a schema itself says of its kind, if no kind without parts is possible."""
        kinds = schema.get("type")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if (
            "enum" in schema
            or "const" in schema
            or not isinstance(kinds, list)
            or any(kind not in _NESTED for kind in kinds)
        ):
            return []
        return [self._any([self._object(schema)] * ("object" in kinds) + [self._list(schema)] * ("array" in kinds))]

    def _object(self, schema: Mapping[str, Any]) -> _Part:
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return self._all([])
        names = {name: None for name in required if isinstance(name, str)}
        parts = self._schemas([properties[name] for name in names if name in properties])
        if not properties.keys() >= names.keys():
            patterns = schema.get("patternProperties", {})
            others = patterns.values() if isinstance(patterns, Mapping) else ()
            parts.append(self._any(self._schemas([schema.get("additionalProperties", True), *others])))
        return self._all(parts)

    def _list(self, schema: Mapping[str, Any]) -> _Part:
        least, first, others = schema.get("minItems", 0), schema.get("prefixItems", []), schema.get("items", True)
        if not isinstance(least, int) or not isinstance(first, list):
            return self._all([])
        return self._all(self._schemas([*first[: max(0, least)], *([others] * (least > len(first)))]))


def _target(root: Any, pointer: str) -> Any:
    """What a local reference names; anything goes (True) where it names nothing that can be followed here."""
    if not pointer.startswith("#"):
        return True
    for name in pointer[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and len(name) <= _INDEX_DIGITS and int(name) < len(root):
            root = root[int(name)]
        elif isinstance(root, Mapping) and name in root:
            root = root[name]
        else:
            return True
    return root if pointer == "#" or pointer.startswith("#/") else True
