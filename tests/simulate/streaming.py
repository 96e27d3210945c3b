"""The texts and events of simulated prompt streams."""

from streamserve.fleet.events import Deliver
from streamserve.protocol.messages import OutputWithdrawn, Progress, Token


def texts(received) -> tuple[dict[tuple[str, int], list[int]], int, int]:
    """Return the final tokens, and the number of progress and withdrawal events."""
    tokens, progress, withdrawn = {}, 0, 0
    for item in received:
        assert isinstance(item.message, Deliver), item.message
        for event in item.message.events:
            if isinstance(event, Token):
                tokens.setdefault((event.request, event.choice), []).append(event.token)
            elif isinstance(event, OutputWithdrawn):
                withdrawn += 1
                for key in [key for key in tokens if key[0] == event.request]:
                    del tokens[key]
            progress += isinstance(event, Progress)
    return tokens, progress, withdrawn
