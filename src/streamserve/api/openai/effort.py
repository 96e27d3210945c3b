"""How much the model reasons: the request's fields as variables of the chat template, where it has them."""

from typing import Any

import msgspec

from streamserve.api.generator import Generator
from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.schemas import EFFORTS, ChatRequest
from streamserve.protocol.errors import RequestError
from streamserve.text.reasoning import CLOSING

_LEVEL = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
"""Names of the variable that turns reasoning on or off, in the templates of model families."""


def with_effort(body: ChatRequest, llm: Generator, ignored: IgnoredFields, name: str = _LEVEL) -> ChatRequest:
    """Return `body` with its reasoning_effort as variables of the template.

    An effort of "none" turns reasoning off, others turn it on. What the template has no variable for is added
    to `ignored` under the request's `name` of the field. Raises RequestError for an unknown effort.
    """
    effort = body.reasoning_effort
    if effort is None:
        return body
    if effort not in EFFORTS:
        raise RequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}", field=_LEVEL)
    variables = _variables(llm)
    if effort == "none":
        return with_thinking(body, False, llm, ignored, name)
    body = with_thinking(body, True, llm, None, name)
    if _LEVEL in variables:
        return _with_variable(body, _LEVEL, effort)
    ignored.add(name, _HINT)
    return body


def with_thinking(
    body: ChatRequest, on: bool, llm: Generator, ignored: IgnoredFields | None, name: str
) -> ChatRequest:
    """Return `body` with reasoning turned on or off, if the template has a variable for it.

    If it has none, `name` is added to `ignored`, unless a model that does not reason is asked not to.
    """
    variables = _variables(llm)
    switch = next((switch for switch in _SWITCHES if switch in variables), None)
    if switch is not None:
        return _with_variable(body, switch, on)
    reasons = CLOSING in (llm.tokenizer.chat_template or "")
    if ignored is not None and (on or reasons or _LEVEL in variables):
        ignored.add(name, _HINT)
    return body


_HINT = " with this model's chat template"


def _variables(llm: Generator) -> frozenset[str]:
    return llm.chat_template.variables if llm.chat_template else frozenset()


def _with_variable(body: ChatRequest, name: str, value: Any) -> ChatRequest:
    """Set a variable of the template, unless the request itself sets it."""
    return msgspec.structs.replace(
        body, chat_template_kwargs={name: value, **(body.chat_template_kwargs or {})}
    )
