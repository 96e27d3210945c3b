"""Keeps the outputs of requests with an idempotency key, for the worker's next head.

Submit, Join ──▶ tokens that the client has     Events ──▶ the tokens after them     Cancel ──▶ forgotten

Outputs of ended requests stay until newer outputs need the space: a worker cannot know whether the client got
all tokens.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from streamserve.protocol.kept import MAX_KEPT_BYTES, MAX_KEPT_OUTPUTS
from streamserve.protocol.messages import (
    Cancel,
    Event,
    Finished,
    KeptOutput,
    KeptOutputs,
    KeptToken,
    Submit,
    ToEngine,
    Token,
)
from streamserve.protocol.transfers import Join

MAX_IN_MESSAGE = 64
Choices = dict[int, list[KeptToken]]


class OutputKeeper:
    """The kept outputs by request, oldest first: at most `max_requests` outputs of about `max_bytes` bytes
    together."""

    def __init__(self, max_requests: int = MAX_KEPT_OUTPUTS, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_requests, self._max_bytes = max_requests, max_bytes
        self._kept: OrderedDict[str, tuple[bytes, Choices]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def apply(self, message: ToEngine) -> None:
        """Process a message that goes to the engine."""
        match message:
            case Submit() if message.keep and not message.open and message.phase != "return":
                digest, known = self._kept.get(message.request, (b"", {}))
                if digest != message.keep:  # an earlier head used the name for another request
                    known = {}
                self._forget(message.request)
                self._kept[message.request] = message.keep, {}
                for choice, tokens in message.outputs.items():
                    same = [kept.token for kept in known.get(choice, [])] == tokens
                    self._extend(
                        message.request, choice, known.get(choice, []) if same else _unscored(tokens)
                    )
                self._limit()
            case Join(request=request) if request in self._kept:
                for choice, tokens in message.outputs.items():
                    have = len(self._kept[request][1].get(choice, []))
                    self._extend(request, choice, _unscored(tokens[have:]))
                self._limit()
            case Cancel(request, None):
                self._forget(request)

    def sent(self, events: Iterable[Event]) -> None:
        """Process events that were sent to the head."""
        if not self._kept:
            return
        for event in events:
            if event.request not in self._kept:
                continue
            if isinstance(event, Token):
                choices = self._kept[event.request][1]
                if event.index == len(choices.get(event.choice, [])):
                    kept = KeptToken(event.token, event.logprob, event.top, event.finish)
                    self._extend(event.request, event.choice, [kept])
            elif isinstance(event, Finished) and event.reason in ("abort", "error"):
                self._forget(event.request)
        self._limit()

    def messages(self, model: str) -> Iterator[KeptOutputs]:
        """Yield messages with all kept outputs, which this model (ModelInfo.kv_name) has computed."""
        outputs = [KeptOutput(digest, choices) for digest, choices in self._kept.values()]
        for start in range(0, len(outputs), MAX_IN_MESSAGE):
            yield KeptOutputs(model, outputs[start : start + MAX_IN_MESSAGE])

    def _extend(self, request: str, choice: int, tokens: list[KeptToken]) -> None:
        self._kept[request][1].setdefault(choice, []).extend(tokens)
        self._bytes += sum(token.size for token in tokens)

    def _limit(self) -> None:
        """Forget the oldest requests beyond the limits."""
        while len(self._kept) > self._max_requests or self._bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, request: str) -> None:
        _, choices = self._kept.pop(request, (b"", {}))
        self._bytes -= sum(token.size for tokens in choices.values() for token in tokens)


def _unscored(tokens: list[int]) -> list[KeptToken]:
    return [KeptToken(token) for token in tokens]
