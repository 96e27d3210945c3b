"""Errors about a converted chat request, with the field names of the original route."""

from collections.abc import Mapping

from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Translate the field names in an error about a chat request.

    `names` maps field names of a chat to names of the route, which may be paths. The field at fault is
    renamed in `error.field` and in the message. Names with a dot are replaced in the message of every error.
    """
    message, field = error.message, error.field
    for chat_name, name in names.items():
        if chat_name == field or "." in chat_name:
            message = message.replace(chat_name, name, 1)
    field = field_of(names.get(field, field)) if field else None
    return RequestError(
        message, field=field, status=error.status, retry_after=error.retry_after, code=error.code
    )
