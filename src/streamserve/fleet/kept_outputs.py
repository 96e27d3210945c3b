"""Outputs that adopted workers have kept from another head's requests: a repeated request begins with them.

KeptOutputs of several workers ── merged by digest ──▶ outputs ── Open with a digest ──▶ its first tokens
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamserve.fleet.events import Open
from streamserve.protocol.kept import KEPT_SECONDS, MAX_KEPT_BYTES, MAX_KEPT_OUTPUTS
from streamserve.protocol.messages import KeptOutputs, KeptToken

logger = logging.getLogger(__name__)

MAX_OUTPUTS, MAX_BYTES = 4 * MAX_KEPT_OUTPUTS, 2 * MAX_KEPT_BYTES
Kept = Mapping[int, Sequence[KeptToken]]
"""The first output tokens of a request, by choice."""
NOTHING: Kept = {}


@dataclass
class _Output:
    at: float
    choices: dict[int, list[KeptToken]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(token.size for tokens in self.choices.values() for token in tokens)


class KeptOutputStore:
    """Outputs by model and digest, bounded in number, bytes and time. `resumed` counts the requests that
    began with kept outputs, `resumed_tokens` their tokens."""

    def __init__(self) -> None:
        self.resumed = self.resumed_tokens = 0
        self._outputs: OrderedDict[tuple[str, bytes], _Output] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, message: KeptOutputs, now: float) -> None:
        """Merge the outputs that a worker has kept with the outputs from other workers."""
        for output in message.outputs:
            key = message.model, output.digest
            known = self._outputs.pop(key, None) or _Output(now)
            self._bytes -= known.bytes
            merged = {
                choice: _merged(known.choices.get(choice, []), output.choices.get(choice, []))
                for choice in {*known.choices, *output.choices}
            }
            self._outputs[key] = added = _Output(now, merged)
            self._bytes += added.bytes
        while len(self._outputs) > MAX_OUTPUTS or self._bytes > MAX_BYTES:
            self._drop(next(iter(self._outputs)))

    def find(self, model: str, request: Open, now: float) -> Kept:
        """Return the kept tokens with which a request to this model can begin, for each choice that has any.
        If the request asks for log-probabilities, kept tokens are used up to the first token without them."""
        self.expire(now)
        output = self._outputs.get((model, request.keep)) if request.keep else None
        if output is None or request.open:
            return NOTHING
        scored = request.params.logprobs is not None
        usable = {
            choice: _usable(tokens, scored, request.params.max_tokens or 0)
            for choice, tokens in output.choices.items()
            if 0 <= choice < request.params.n
        }
        found = {choice: tokens for choice, tokens in usable.items() if tokens}
        self.resumed += bool(found)
        self.resumed_tokens += sum(map(len, found.values()))
        return found

    def expire(self, now: float) -> None:
        """Forget the outputs that no client has requested within KEPT_SECONDS."""
        for key in [key for key, output in self._outputs.items() if now - output.at > KEPT_SECONDS]:
            self._drop(key)

    def _drop(self, key: tuple[str, bytes]) -> None:
        self._bytes -= self._outputs.pop(key).bytes


def _merged(first: list[KeptToken], second: list[KeptToken]) -> list[KeptToken]:
    """Return the longer of two outputs of one choice, with the log-probabilities of both. If they contradict
    each other, return their common prefix."""
    merged: list[KeptToken] = []
    for one, other in zip(first, second, strict=False):
        if one.token != other.token:
            logger.error(
                "two workers have kept different outputs of one request: only their common beginning is used"
            )
            return merged
        merged.append(other if one.logprob is None else one)
    return merged + first[len(merged) :] + second[len(merged) :]


def _usable(tokens: list[KeptToken], scored: bool, limit: int) -> list[KeptToken]:
    usable: list[KeptToken] = []
    for token in tokens[:limit]:
        if scored and token.logprob is None:
            break
        usable.append(token)
        if token.finish:
            break
    return usable
