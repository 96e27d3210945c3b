"""Fields without effect, given the other fields of a request: left out with a warning, or refused if fields
are strict."""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.messages import KNOWN, PART_FIELDS
from streamserve.api.openai.schemas import ChatRequest, GenerationRequest

G = TypeVar("G", bound=GenerationRequest)


def without_idle_fields(body: G, ignored: IgnoredFields) -> G:
    """Return `body` without the fields that have no effect, which are added to `ignored`.

    If fields are strict, they stay: the checks of the request refuse them.
    """
    options = body.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        ignored.add("stream_options.continuous_usage_stats", " without include_usage")
    if options is not None and options.include_obfuscation:
        ignored.add("stream_options.include_obfuscation")
    if ignored.strict:
        return body
    changes: dict[str, Any] = {}
    if options is not None and not body.stream:
        ignored.add("stream_options", " without stream")
        changes["stream_options"] = None
    if isinstance(body, ChatRequest):
        if body.top_logprobs == 0 and not body.logprobs:
            ignored.add("top_logprobs", " without logprobs")
            changes["top_logprobs"] = None
        changes["messages"] = without_unknown_keys(body.messages, ignored)
    return msgspec.structs.replace(body, **changes)


def without_unknown_keys(messages: list[dict[str, Any]], ignored: IgnoredFields) -> list[dict[str, Any]]:
    """Return messages without unknown keys, which cannot affect the prompt. If fields are strict, return them
    unchanged."""
    return messages if ignored.strict else [_known_message(message, ignored) for message in messages]


def _known_message(message: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any]:
    known = known_keys(message, KNOWN, "messages[].", ignored)
    content = known.get("content")
    if not isinstance(content, list):
        return known
    parts = [
        known_keys(part, PART_FIELDS, "messages[].content[].", ignored) if _is_text(part) else part
        for part in content
    ]
    return {**known, "content": parts}


def known_keys(
    entry: dict[str, Any], known: Iterable[str], inside: str, ignored: IgnoredFields
) -> dict[str, Any]:
    """Return an entry without its unknown keys, which are added to `ignored`. `inside` is the entry's path in
    the request, such as "messages[]."."""
    unknown = [name for name in entry if name not in known]
    for name in unknown:
        if entry[name] is not None:
            ignored.add_unknown(f"{inside}{name}")
    return {name: value for name, value in entry.items() if name not in unknown} if unknown else entry


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"
