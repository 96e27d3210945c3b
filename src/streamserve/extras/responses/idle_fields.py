"""Fields of a response's request that have no effect: left out with a warning, or refused if fields are
strict."""

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.extras.responses.response_schemas import ENCRYPTED_REASONING, ResponseRequest


def response_without_idle_fields(body: ResponseRequest, ignored: IgnoredFields) -> ResponseRequest:
    """Return a request of /v1/responses without the fields that have no effect, as `without_idle_fields`
    does: encrypted reasoning, summaries of reasoning, and verbosity are not supported."""
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
    return msgspec.structs.replace(body, text=text, include=include)
