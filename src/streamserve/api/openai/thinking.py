"""Fields for whether and how much to reason, passed as variables of the model's chat template."""

from typing import Any, get_args

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.schemas import ChatRequest, Effort
from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of
from streamserve.text.chat import Renderer

SWITCHES = ("enable_thinking", "thinking")
"""Names that templates use for a variable which is true if the model should reason."""
EFFORT = "reasoning_effort"
_HINT = " without a variable for it in the chat template"


def with_thinking(
    body: ChatRequest,
    template: Renderer | None,
    ignored: IgnoredFields,
    effort_name: str = EFFORT,
    switch_name: str = SWITCHES[0],
) -> ChatRequest:
    """Return `body` with `enable_thinking` and `reasoning_effort` among the template's variables.

    As in vLLM, an effort also sets the variable for whether to reason. Values in chat_template_kwargs take
    precedence. A field for which the template has no variable is added to `ignored`, under the name that the
    request uses (`effort_name`, `switch_name`). Raises RequestError if fields are strict.
    """
    known = template.variables if template else frozenset()
    switch = next((name for name in SWITCHES if name in known), None)
    values: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        if EFFORT in known:
            values[EFFORT] = body.reasoning_effort
        if switch is not None:
            values[switch] = body.reasoning_effort != "none"
        if not values and body.reasoning_effort != "none":
            ignored.add(effort_name, _HINT)
    if body.enable_thinking is not None:
        if switch is not None:
            values[switch] = body.enable_thinking
        else:
            ignored.add(switch_name, _HINT)
    if not values:
        return body
    return msgspec.structs.replace(body, chat_template_kwargs={**values, **(body.chat_template_kwargs or {})})


def checked_effort(value: Any, name: str) -> str | None:
    """Return the effort `value` of the request's field `name`. Raises RequestError if it is no value of
    `Effort`."""
    if value is not None and value not in get_args(Effort):
        raise RequestError(f"{name} must be one of {', '.join(get_args(Effort))}", field=field_of(name))
    return value  # type: ignore[no-any-return]
