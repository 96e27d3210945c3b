"""GET /docs: the OpenAPI document as a page from which examples can be sent."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.ops.openapi import Document, Schema
from streamserve.api.routes import Operation, Route
from streamserve.extras.web_page.page import page_response
from streamserve.protocol.numbers import plain

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Chats and completions", ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/messages")),
    ("Ollama", ("/api/",)),
    ("Prompt streams", ("/v1/streams",)),
    ("LoRA adapters", ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
    (
        "Embeddings and scores",
        ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    ),
    ("Batches and files", ("/v1/batches", "/v1/files")),
    ("Models and tokens", ("/v1/models", "/tokenize", "/detokenize")),
)
"""Groups of routes, each with prefixes of the routes' paths. Routes without a group are for operators."""

OTHERS = "Operations"

_UPLOADS = {("post", "/v1/files"): "-F purpose=batch -F file=@requests.jsonl"}
"""Routes to which a form is uploaded, with the arguments for curl."""


async def docs(document: Document, request: Request) -> Response:
    """Return the document as a page."""
    description = document()
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    return page_response(
        "docs.html", title=title, contents=_contents(description), routes=_routes(description)
    )


DOCS_ROUTES: tuple[Route[Document], ...] = (
    Route("GET", "/docs", docs, Operation("This description, as a page", media="text/html")),
)


Entry = tuple[str, str, Schema]
"""A method, a path, and the operation."""


def _grouped(description: Schema) -> dict[str, list[Entry]]:
    """Return the operations by group."""
    groups: dict[str, list[Entry]] = {name: [] for name in [*dict(GROUPS), OTHERS]}
    for path, operations in description["paths"].items():
        group = next((name for name, starts in GROUPS if path.startswith(starts)), OTHERS)
        groups[group] += [(method, path, operation) for method, operation in operations.items()]
    return {name: entries for name, entries in groups.items() if entries}


def _contents(description: Schema) -> str:
    return "".join(
        f"<h2>{escape(group)}</h2><ul>{''.join(map(_link, entries))}</ul>"
        for group, entries in _grouped(description).items()
    )


def _link(entry: Entry) -> str:
    method, path, operation = entry
    text = f"{_method(method)}<span>{escape(path)}</span>"
    return f'<li><a href="#{_anchor(operation)}" title="{escape(operation["summary"])}">{text}</a></li>'


def _routes(description: Schema) -> str:
    schemas = description["components"]["schemas"]
    return "".join(
        f"<h2>{escape(group)}</h2>" + "".join(_route(*entry, schemas) for entry in entries)
        for group, entries in _grouped(description).items()
    )


def _route(method: str, path: str, operation: Schema, schemas: dict[str, Schema]) -> str:
    """Return the section of one operation: an example, and its fields."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    example = content["examples"]["request"]["value"] if content else None
    anchor = _anchor(operation)
    return (
        f'<section class="route" id="{anchor}" {_sendable(method, path, example)}>'
        f'<h3><a href="#{anchor}">{_method(method)} <code>{escape(path)}</code></a></h3>'
        f"<p>{escape(operation['summary'])}.</p>"
        f'<figure class="code"><figcaption><span>curl</span></figcaption>'
        f"<pre>{escape(_call(method, path, example))}</pre></figure>"
        f"{''.join(_tables(content, operation, schemas))}</section>"
    )


def _sendable(method: str, path: str, example: Any) -> str:
    """Return the attributes with which the page's script can send the example; "" for uploads."""
    if (method, path) in _UPLOADS:
        return ""
    body = "" if example is None else f' data-example="{escape(json.dumps(example))}"'
    return f'data-method="{method.upper()}" data-path="{escape(path)}"{body}'


def _method(method: str) -> str:
    return f'<span class="method {method}">{method.upper()}</span>'


def _anchor(operation: Schema) -> str:
    return escape(operation["operationId"])


def _tables(content: Schema | None, operation: Schema, schemas: dict[str, Schema]) -> Iterator[str]:
    """Yield tables of the fields of the request, the response, and the stream events."""
    if content is not None:
        yield _fields("Request:", content["schema"], schemas)
    for media, reply in operation["responses"]["200"].get("content", {}).items():
        schema = reply["schema"]
        if "$ref" in schema:
            yield _fields("Response:", schema, schemas)
        elif "x-event" in schema:
            yield _fields("Stream events:", schema["x-event"], schemas)
        else:
            yield f'<p class="fields">Response: {escape(media)}.</p>'


def _call(method: str, path: str, example: Any) -> str:
    """Return the command that sends an example."""
    address = f"http://localhost:8000{path}"
    if (method, path) in _UPLOADS:
        return f"curl {address} {_UPLOADS[method, path]}"
    usual = "get" if example is None else "post"
    verb = "" if method == usual else f"-X {method.upper()} "
    return f"curl {verb}{address}" + ("" if example is None else f" -d '{json.dumps(example)}'")


def _fields(what: str, reference: Schema, schemas: dict[str, Schema]) -> str:
    """Return a folded table of an object's fields. Unsupported fields come last."""
    name = _name(reference)
    if "properties" not in schemas[name]:
        return f'<p class="fields">{what} <code>{escape(_kind(schemas[name]))}</code>.</p>'
    schema = schemas[name]
    rows = [_row(field, about, schema.get("required", ())) for field, about in schema["properties"].items()]
    rows.sort(key=lambda row: row.startswith("<tr class=unsupported>"))
    text = escape(schema.get("description", ""))
    return (
        f'<details class="fields"><summary>{what} <code>{escape(name)}</code></summary>'
        f"<p>{text}</p><table>{''.join(rows)}</table></details>"
    )


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
        notes.append(f"{plain(low)} to {plain(high)}")
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
