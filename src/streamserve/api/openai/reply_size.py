"""Limits on prompt text that a reply repeats in each choice, and the encoding of large replies without long
pauses."""

import msgspec

from streamserve.api.openai.replies import ChatReply, CompletionReply
from streamserve.protocol.errors import RequestError

MAX_REPEATED = 16 << 20
"""Maximum number of characters of JSON that a reply without streaming repeats from its prompts, over all
choices: texts with echo, and token ids with return_token_ids."""

REPEATED_BYTES = 4
"""Bytes of a repeated character until its reply is written: in its choice, and twice as JSON."""

TOKEN_CHARACTERS = 8
"""Characters of a token id in JSON, including its comma."""

TEXT_BYTES, TOKEN_BYTES = 4, 48
"""Bytes of a generated character, and of a token id, until the reply is written."""


def check_repeated(characters: int, field: str) -> None:
    """Raise RequestError about `field` if a reply would repeat more than `MAX_REPEATED` characters."""
    if characters > MAX_REPEATED:
        raise RequestError(
            f"{field} would repeat {characters} characters of the prompts in the reply, and {MAX_REPEATED} "
            "is the limit: request a stream, or fewer prompts or choices",
            field=field,
        )


def encoded(reply: CompletionReply | ChatReply) -> bytes:
    """Return a reply as JSON. It is encoded choice by choice, so that other threads can run in between."""
    choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in reply.choices]
    return msgspec.json.encode(msgspec.structs.replace(reply, choices=choices))
