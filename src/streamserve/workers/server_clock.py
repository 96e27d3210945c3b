"""Converts times in messages between the server's clock and the clock of a worker's machine.

The server's clock is `offset` seconds ahead of this machine's clock. On the server's machine both are one
clock.
"""

from msgspec.structs import replace

from streamserve.protocol.messages import Edit, FromWorker, Submit, ToEngine, Traced
from streamserve.protocol.transfers import Join


def to_local(message: ToEngine, offset: float) -> ToEngine:
    """Return a message from the server with times of this machine's clock."""
    if not offset:
        return message
    match message:
        case Submit():
            began = {choice: at - offset for choice, at in message.began.items()}
            return replace(message, arrival=message.arrival - offset, began=began)
        case Edit():
            return replace(message, arrival=message.arrival - offset)
        case Join():
            return replace(message, began={choice: at - offset for choice, at in message.began.items()})
        case _:
            return message


def to_server(message: FromWorker, offset: float) -> FromWorker:
    """Return a message to the server with times of the server's clock."""
    if not offset or not isinstance(message, Traced):
        return message
    return Traced([replace(work, at=work.at + offset) for work in message.work])
