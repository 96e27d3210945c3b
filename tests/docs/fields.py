"""The fields of requests, by the class that the documentation puts them in."""

from collections.abc import Mapping

from streamserve.api.openai.other_fields import OTHER_IN_CHATS, OTHER_IN_COMPLETIONS
from streamserve.api.openai.schemas import ChatRequest, CompletionRequest
from streamserve.extras.anthropic.other_fields import OTHER_IN_MESSAGES
from streamserve.extras.anthropic.schemas import MessagesRequest
from streamserve.extras.responses.other_fields import OTHER_IN_RESPONSES
from streamserve.extras.responses.response_schemas import ResponseRequest

ROUTES = {
    "completions": (CompletionRequest, OTHER_IN_COMPLETIONS),
    "chats": (ChatRequest, OTHER_IN_CHATS),
    "responses": (ResponseRequest, OTHER_IN_RESPONSES),
    "messages": (MessagesRequest, OTHER_IN_MESSAGES),
}
CLASSES = ("obeyed", "without effect (warning)", "refused (400)")


def fields_of(kind: str, route: str) -> set[str]:
    """Return the names of a route's fields in one class."""
    struct, others = ROUTES[route]
    names: Mapping[str, set[str]] = {
        CLASSES[0]: set(struct.__struct_fields__),
        CLASSES[1]: set(others.without_effect),
        CLASSES[2]: set(others.refused),
    }
    return names[kind]
