"""Tool calls as a grammar (Lark, as `llguidance` reads it), so that a call that must be made is made, and is sound.

Parameters come in the order of the schema, the required ones always. Text is free, or of a format (a date, a time, a
UUID, an address), or one of an `enum`, also behind a reference to a definition or as one of several alternatives;
everything else is JSON by its own schema.
The markup's own token is named by id: no text can spell it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from spyglass.engine.structured.compile import MAX_GRAMMAR_CHARS, followable
from spyglass.engine.structured.schema_is_finite import schema_is_finite
from spyglass.errors import PromptError
from spyglass.families import FAMILIES
from spyglass.server.protocols.tags import DSML

_REFERENCE = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_DEPTH = 8  # references and alternatives inside one another that are followed to find text
_FOURS = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    r"((000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
    f"|([0-9]{{2}}{_FOURS}|{_FOURS}00)-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX, _BYTE = "[0-9a-f]", r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# Formats that a parameter of text must have, which in JSON the grammar library knows itself
_FORMATS = {
    "date": _DATE,
    "time": _CLOCK,
    "date-time": f"{_DATE}T{_CLOCK}",
    "uuid": f"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
}
_SAYS_NOTHING = {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}


def calls_grammar(
    family: str, tools: Mapping[str, Any], dsml: int, *, one_call: bool, opened: bool = True, answer: Any = None
) -> str:
    """The grammar of what follows an opened block: calls of `tools` (schemas by name), then the end of the block.

    `dsml`: id of the markup's token. Not `opened`: the block comes first. With `answer`, a schema, it is not open
    either, and JSON of that schema may stand in its place.

    Raises:
        PromptError: a schema is none, or has no value that ends, or they are too large together.
    """
    space, block = FAMILIES[family].tag_space, FAMILIES[family].calls_tag
    calls = f"{'call' if one_call else 'call+'} {_tag(dsml, f'{space}{block}>', '</')}"
    if not opened or answer is not None:
        calls = " ".join((_tag(dsml, f"{space}{block}>\n", "\n\n<"), calls))
    if answer is not None:
        calls = f"({_json(answer, 'of the answer')}) | {calls}"
    rules = [
        f"start: {calls}",
        "call: " + " | ".join(f"call{number}" for number in range(len(tools))),
        # up to the "</" before the token; spelled in pieces, the mark would be taken for the end of the value
        rf"TEXT: /(?s:.*)<\// & ~/(?s:.*)<\/{DSML}(?s:.*)/",
    ]
    left = MAX_GRAMMAR_CHARS
    for number, (name, schema) in enumerate(tools.items()):
        parameters = []
        properties, required = _properties(schema, name)
        for key, value in properties.items():  # each may repeat the definitions of the whole schema
            parameters.append(_parameter(key, value, schema, dsml, space, key in required))
            left = _left_after(parameters[-1], left)
        begin, end = _tag(dsml, f'{space}invoke name="{name}">\n'), _tag(dsml, f"{space}invoke>\n", "</")
        left = _left_after(begin + end, left)
        rules.append(f"call{number}: {begin} {' '.join(parameters)} {end}")
    return "\n".join(rules)


def _left_after(text: str, left: int) -> int:
    """Characters that may follow a piece of the grammar."""
    if len(text) > left:
        raise PromptError(
            "the schemas of the tools, which must be called or stand beside structured output, make a grammar of more "
            f"than {MAX_GRAMMAR_CHARS:,} characters; send fewer tools or smaller schemas"
        )
    return left - len(text)


def _properties(schema: Any, name: str) -> tuple[Mapping[str, Any], Set[str]]:
    """Schemas of the parameters by name, and the names of those that must be there."""
    properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
    required = schema.get("required", []) if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise PromptError(f"the parameters of tool {name!r} are no schema of an object, so no call can be made to fit")
    for spelled in (name, *properties):
        if '"' in spelled or "\n" in spelled:
            raise PromptError(f"tool {name!r} has a name with a quotation mark or line break, which no call can spell")
    return properties, {key for key in required if isinstance(key, str)}


def _parameter(key: str, schema: Any, root: Mapping[str, Any], dsml: int, space: str, required: bool) -> str:
    """One parameter in its one or two forms: text as it is, JSON for everything else."""
    if schema is False:
        raise PromptError(f"the schema of parameter {key!r} is false, which no value fits; leave the parameter out")
    own = schema if isinstance(schema, Mapping) else {}
    forms, rest, kinds = [], f"{space}parameter>\n", list(_alternatives(own, root))
    texts = dict.fromkeys(text for kind in kinds if (text := _text(kind)) is not None)
    if texts:
        forms.append(f"{_open(key, 'true', dsml, space)} ({' | '.join(texts)}) {_tag(dsml, rest, '')}")
    if not texts or not all(map(_is_always_text, kinds)):
        value = _json(with_definitions(own, root), f"of parameter {key!r}")
        forms.append(f"{_open(key, 'false', dsml, space)} {value} {_tag(dsml, rest, '</')}")
    return f"({' | '.join(forms)}){'' if required else '?'}"


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """What a schema says once its reference to a definition is followed, or what each of its alternatives says."""
    own = schema if isinstance(schema, Mapping) else {}
    found = _REFERENCE.fullmatch(reference) if isinstance(reference := own.get("$ref"), str) else None
    if depth < _DEPTH and found is not None and isinstance(known := root.get(found[1]), Mapping) and found[2] in known:
        yield from _alternatives(known[found[2]], root, depth + 1)
    elif depth < _DEPTH and isinstance(several := own.get("anyOf"), list) and several and "type" not in own:
        for one in several:
            yield from _alternatives(one, root, depth + 1)
    else:
        yield own


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema from inside another, with the definitions that it may refer to."""
    own = schema if isinstance(schema, Mapping) else {}
    return {**own, **{name: root[name] for name in ("$defs", "definitions") if name in root}}


def _json(schema: Any, whose: str) -> str:
    text = json.dumps(followable(schema))
    _left_after(text, MAX_GRAMMAR_CHARS)
    if not schema_is_finite(schema):
        raise PromptError(
            f"the schema {whose} has no value that ends: what it requires is impossible or refers to itself"
        )
    return f"%json {text}"


def _text(schema: Mapping[str, Any]) -> str | None:
    """Text with the "</" that follows it; None where the schema does not say that text fits."""
    types, values = schema.get("type"), schema.get("enum")
    if types is None and not set(schema) - _SAYS_NOTHING - {"enum"}:
        types = "string"
    if types != "string" and not (isinstance(types, list) and "string" in types):
        return None
    if not isinstance(values, list):
        form = _FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
        return "TEXT" if form is None else f'(/{form}/ "</")'
    spelled = [json.dumps(value + "</", ensure_ascii=False) for value in values if isinstance(value, str)]
    return f"({' | '.join(spelled)})" if spelled else None


def _is_always_text(schema: Mapping[str, Any]) -> bool:
    values = schema.get("enum")
    listed = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return listed or schema.get("type") in ("string", ["string"])


def _open(key: str, is_text: str, dsml: int, space: str) -> str:
    return _tag(dsml, f'{space}parameter name="{key}" string="{is_text}">')


def _tag(dsml: int, rest: str, begin: str = "<") -> str:
    """A tag: its beginning, the markup's token, the rest."""
    first = json.dumps(begin) + " " if begin else ""
    return f"{first}<[{dsml}]> {json.dumps(rest, ensure_ascii=False)}"
