"""What a reply repeats of its prompts, in each choice: a limit, and the reply as JSON without long pauses."""

import msgspec

from streamserve.api.openai.replies import ChatReply, CompletionReply
from streamserve.protocol.errors import RequestError

MAX_REPEATED = 16 << 20
"""Maximum size of what a reply that is not streamed repeats of its prompts over all choices, in characters of
JSON: texts with echo, and token ids with return_token_ids."""

REPEATED_BYTES = 4
"""Memory of such a character until its reply is written, in bytes: in its choice, and twice as JSON."""

TOKEN_CHARACTERS = 8
"""Characters of a token id in JSON, with its comma."""

TEXT_BYTES, TOKEN_BYTES = 4, 48
"""Memory of a generated character and of a token id until the reply is written, in bytes."""


def check_repeated(characters: int, field: str) -> None:
    """Raise RequestError about `field` if a reply would repeat more than `MAX_REPEATED` characters."""
    if characters > MAX_REPEATED:
        raise RequestError(
            f"{field} would repeat {characters} characters of the prompts in the reply, and {MAX_REPEATED} "
            "is the limit: request a stream, or fewer prompts or choices",
            field=field,
        )


def encoded(reply: CompletionReply | ChatReply) -> bytes:
    """Return a reply as JSON, encoded choice by choice: other threads may run between two of them."""
    choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in reply.choices]
    return msgspec.json.encode(msgspec.structs.replace(reply, choices=choices))
