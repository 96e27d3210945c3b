"""Fields of a response's request that have no effect: left out with a warning, or refused if fields are
strict."""

from typing import Any

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.idle_fields import known_keys
from streamserve.extras.responses.response_input import ITEM_FIELDS, PART_FIELDS, TEXT_PARTS
from streamserve.extras.responses.response_schemas import ENCRYPTED_REASONING, ResponseRequest


def response_without_idle_fields(body: ResponseRequest, ignored: IgnoredFields) -> ResponseRequest:
    """Return a request of /v1/responses without the fields that have no effect, as `without_idle_fields`
    does. These are unknown keys of items and their parts, and the fields for encrypted reasoning, summaries
    of reasoning and verbosity, which are not supported."""
    for name, value in (body.reasoning or {}).items():
        if name != "effort" and value is not None:
            ignored.add(f"reasoning.{name}")
    if ignored.strict:
        return body
    text, include = body.text, body.include
    if text is not None and text.get("verbosity") not in (None, "medium"):
        ignored.add("text.verbosity")
        text = {name: value for name, value in text.items() if name != "verbosity"}
    if ENCRYPTED_REASONING in include:
        ignored.add("include[reasoning.encrypted_content]")
        include = [part for part in include if part != ENCRYPTED_REASONING]
    items = body.input
    if not isinstance(items, str):
        items = [_known_item(item, ignored) for item in items]
    return msgspec.structs.replace(body, input=items, text=text, include=include)


def _known_item(item: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    """Return an item without unknown keys, which cannot affect the prompt. The conversion of the request
    refuses items of unknown types."""
    kind = item.get("type") or "message"
    if not isinstance(kind, str) or kind not in ITEM_FIELDS:
        return item
    known = known_keys(item, {"type", *ITEM_FIELDS[kind]}, "input[].", ignored)
    field = "output" if kind == "function_call_output" else "content"
    parts = known.get(field)
    if not isinstance(parts, list):
        return known
    return {**known, field: [_known_part(part, f"input[].{field}[].", ignored) for part in parts]}


def _known_part(part: Any, inside: str, ignored: IgnoredFields) -> Any:
    texts = (*TEXT_PARTS, "reasoning_text")
    is_text = isinstance(part, dict) and part.get("type") in texts
    return known_keys(part, PART_FIELDS, inside, ignored) if is_text else part
