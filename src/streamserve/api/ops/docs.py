"""GET /openapi.json, and GET /docs: the same as an HTML page, without assets from other servers."""

import json
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.ops.openapi import Schema
from streamserve.api.routes import JSON, Operation, Route

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
h2 { margin-top: 3rem; border-top: 1px solid #ccc; padding-top: 1rem }
code, pre { font: 14px/1.4 ui-monospace, monospace; background: #f4f4f4; border-radius: 4px }
pre { padding: .75rem; overflow-x: auto } code { padding: 0 .25rem }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0;
         border-bottom: 1px solid #eee }
.unsupported td { color: #888 }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818 } code, pre { background: #282828 }
  td, th, h2 { border-color: #333 } }
"""

Document = Callable[[], Schema]
"""Returns the OpenAPI document: the context of these routes."""


async def docs(document: Document, request: Request) -> Response:
    """Return the document as a page."""
    return Response(page(document()), media_type="text/html")


async def openapi(document: Document, request: Request) -> Response:
    """Return the document."""
    return Response(msgspec.json.encode(document()), media_type=JSON)


DOCS_ROUTES: tuple[Route[Document], ...] = (
    Route("GET", "/docs", docs, Operation("This description, as a page", media="text/html")),
    Route("GET", "/openapi.json", openapi, also=("HEAD",)),
)


def page(description: Schema) -> str:
    """Return the whole page."""
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>Every route, from <a href=/openapi.json>/openapi.json</a>. "
        "A server with API keys requires <code>-H 'Authorization: Bearer KEY'</code>.</p>"
        + "".join(_routes(description))
    )


def _routes(description: Schema) -> Iterator[str]:
    schemas = description["components"]["schemas"]
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}."
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if content:
                example = content["examples"]["request"]["value"]
                yield f"<pre>{escape(_call(method, path, example))}</pre>" + _fields(
                    "Request:", content["schema"], schemas
                )
            for media, reply in operation["responses"]["200"].get("content", {}).items():
                schema = reply["schema"]
                if "$ref" in schema:
                    yield _fields("Response:", schema, schemas)
                elif "x-event" in schema:
                    yield _fields("Stream events:", schema["x-event"], schemas)
                else:
                    yield f"<p>Response: {escape(media)}."


def _call(method: str, path: str, example: Any) -> str:
    verb = "" if method == "post" else f"-X {method.upper()} "
    return f"curl {verb}http://localhost:8000{path} -d '{json.dumps(example)}'"


def _fields(what: str, reference: Schema, schemas: dict[str, Schema]) -> str:
    """Return a table of an object's fields, with unsupported ones at the end."""
    name = _name(reference)
    if "properties" not in schemas[name]:
        return f"<p>{what} <code>{escape(_kind(schemas[name]))}</code>."
    schema = schemas[name]
    rows = [_row(field, about, schema.get("required", ())) for field, about in schema["properties"].items()]
    rows.sort(key=lambda row: row.startswith("<tr class=unsupported>"))
    text = escape(schema.get("description", ""))
    return f"<p>{what} <code>{escape(name)}</code>. {text}<table>{''.join(rows)}</table>"


def _row(field: str, about: Schema, required: list[str]) -> str:
    obeyed = not about.get("description", "").startswith(("not supported", "without effect"))
    unsupported = "" if obeyed else " class=unsupported"
    notes = [about.get("description", "")]
    if field in required:
        notes.append("required")
    if about.get("default") is not None:
        notes.append(f"default {json.dumps(about['default'])}")
    low, high = (about.get(bound) for bound in ("minimum", "maximum"))
    if low is not None and high is not None:
        notes.append(f"{low:g} to {high:g}")
    text = escape("; ".join(note for note in notes if note))
    return f"<tr{unsupported}><td><code>{escape(field)}</code><td>{escape(_kind(about))}<td>{text}"


def _kind(schema: Schema) -> str:
    """Return a short name of a schema's type."""
    if "$ref" in schema:
        return _name(schema)
    if "anyOf" in schema:
        return " or ".join(_kind(kind) for kind in schema["anyOf"] if kind != {"type": "null"})
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"] if value is not None) or "null"
    kinds = schema.get("type", "anything")
    kind = kinds if isinstance(kinds, str) else next(kind for kind in kinds if kind != "null")
    return f"array of {_kind(schema['items'])}" if kind == "array" and schema.get("items") else kind


def _name(reference: Schema) -> str:
    return str(reference["$ref"].rsplit("/", 1)[1])
