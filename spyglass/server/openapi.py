"""`/openapi.json` and `/docs`: what the protocols read, from the very tables they read it by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from spyglass import __version__
from spyglass.server.exchange import Endpoint
from spyglass.server.protocols.described import DESCRIBED
from spyglass.server.protocols.fields import Fields

# What takes no body, or a body that is read elsewhere: method, path and what it is.
READS = (
    ("get", "/v1/models", "The model and its adapters"),
    ("get", "/v1/models/{name}", "One of them"),
    ("get", "/health", "Whether everything works: 200, else 503 with what does not"),
    ("get", "/metrics", "Numbers for Prometheus"),
    ("get", "/version", "The version of the server"),
    ("get", "/props", "The model, its context and its defaults, as llama.cpp tells them"),
    ("get", "/api/tags", "The model and its adapters, for Ollama's clients"),
    ("get", "/api/ps", "The same: all are loaded"),
    ("get", "/api/version", "The version of Ollama whose protocol this is"),
    ("get", "/openapi.json", "This description"),
    ("get", "/docs", "This description as a page"),
    ("get", "/", "A page to try the model"),
    ("get", "/playground/plan", "How an image of a width and height becomes tokens"),
    ("post", "/v1/load_lora_adapter", "Serve an adapter from a folder (lora_name, lora_path), where that is allowed"),
    ("post", "/v1/unload_lora_adapter", "Serve an adapter no more (lora_name), where that is allowed"),
)
_RULES = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STYLE = """:root{color-scheme:light dark;font:16px/1.5 system-ui,sans-serif}
body{max-width:60rem;margin:0 auto;padding:1rem}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .6rem .2rem 0;
border-bottom:1px solid #8884}code{overflow-wrap:anywhere}summary{cursor:pointer;padding:.3rem 0}small{opacity:.8}"""


def describe_api(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 description of a server with these protocols."""
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        body = {"required": True, "content": {"application/json": {"schema": _object(endpoint.fields)}}}
        answers = {"200": {"description": "The answer, or a stream of it"}, "4XX": {"description": "What is wrong"}}
        paths[endpoint.path] = {
            "post": {"summary": (endpoint.__doc__ or "").split("\n\n")[0], "requestBody": body, "responses": answers}
        }
    for method, path, summary in READS:
        answer = {"responses": {"200": {"description": "The answer"}}}
        names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
        place = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
        paths.setdefault(path, {})[method] = {"summary": summary, **answer, **({"parameters": place} if place else {})}
    key = {"key": {"type": "http", "scheme": "bearer", "description": "If the server was started with a key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Spyglass", "version": __version__, "description": "Fields without effect are named in the "
                 "header x-spyglass-ignored; unknown ones too, unless the server is strict."},
        "paths": paths,
        "components": {"securitySchemes": key},
        "security": [{}, {"key": []}],
    }  # fmt: skip


def openapi_routes(endpoints: Sequence[Endpoint]) -> Sequence[Route]:
    """The description as JSON, and as a page that needs nothing else."""
    told = describe_api(endpoints)
    page = docs_page(told)

    async def as_json(_: Request) -> Response:
        return JSONResponse(told)

    async def as_page(_: Request) -> Response:
        headers = {"content-security-policy": _RULES, "x-content-type-options": "nosniff"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    return [Route("/openapi.json", as_json), Route("/docs", as_page)]


def docs_page(told: Mapping[str, Any]) -> str:
    """The description for people."""
    parts = []
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            head = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
            if "requestBody" not in operation:
                parts.append(f"<p>{head}</p>")
                continue
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            rows = "".join(
                f"<tr><td><code>{escape(place)}</code></td><td>{escape(kind)}</td><td>{escape(about)}</td></tr>"
                for place, kind, about in _rows(schema)
            )
            unused = ", ".join(f"<code>{escape(name)}</code>" for name in schema["x-ignored"])
            parts.append(
                f'<details id="{escape(path.strip("/").replace("/", "-"))}"><summary>{head}</summary><table>'
                f"<tr><th>field</th><th>type</th><th>what</th></tr>{rows}</table>"
                f"<p><small>Taken without effect: {unused or 'nothing'}.</small></p></details>"
            )
    info = told["info"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{info['title']} API</title><style>{_STYLE}</style><h1>{info['title']} {info['version']}</h1>"
        f'<p>{escape(info["description"])} The same as <a href="openapi.json">OpenAPI</a>.</p>{"".join(parts)}</html>'
    )


def _object(fields: Fields) -> dict[str, Any]:
    properties = {name: _field(fields, name) for name in sorted(fields.read)}
    for name, values in sorted(fields.neutral.items()):
        told = "taken at this value only" if values else "not available here"
        properties[name] = {"description": told, **({"enum": list(values)} if values else {"not": {}})}
    return {"type": "object", "properties": properties, "x-ignored": sorted(fields.ignored)}


def _field(fields: Fields, name: str) -> dict[str, Any]:
    kinds, about = DESCRIBED[name]
    kind = kinds.split("|")
    schema: dict[str, Any] = {"type": kind[0] if len(kind) == 1 else kind, "description": about}
    inner = fields.inner.get(name)
    if isinstance(inner, Fields):
        return {**_object(inner), **schema}
    if inner is not None:
        items = [_object(one) for one in inner]
        schema["items"] = items[0] if len(items) == 1 else {"anyOf": items}
    return schema


def _rows(schema: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, str, str]]:
    """Place, type and line of every field, those of inner objects behind their own."""
    for name, field in schema["properties"].items():
        kind = field.get("type", "")
        values = " or ".join(map(json.dumps, field.get("enum", ())))
        yield f"{where}{name}", kind if isinstance(kind, str) else " or ".join(kind), f"{field['description']} {values}"
        if "properties" in field:
            yield from _rows(field, f"{where}{name}.")
        items = field.get("items", {})
        seen = set[str]()
        for one in items.get("anyOf", [items] if items else []):
            for row in _rows(one, f"{where}{name}[]."):
                if row[0] not in seen:
                    seen.add(row[0])
                    yield row
