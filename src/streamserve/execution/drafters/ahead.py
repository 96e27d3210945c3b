"""Chains that are drafted before the tokens before them are known.

    host     launch verification n, draft n + 1 | results of n, plan, launch verification n + 1 | results …
    device   ██████████████ verification n ██████████████ draft n + 1 █████████ verification n + 1 ███████

The drafter reads all tokens that the verification may have yielded; those that it has not are read as
padding, after the ones that count, and written over later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamserve.contracts.plan import DraftRequest, Span
from streamserve.execution.drafters.chains import ChainsInFlight


@dataclass(frozen=True)
class Part:
    """A tree's part of the chains that are drafted together: its `number`, how many `levels` it has, and the
    rows of the hidden states of what was read before: `count` from `row` on."""

    number: int
    levels: int
    row: int
    count: int


def parts_of(spans: Sequence[Span], levels: Sequence[int]) -> list[Part]:
    """Return the parts of chains of so many levels, one after each span."""
    parts, row = [], 0
    for number, (span, count) in enumerate(zip(spans, levels, strict=True)):
        parts.append(Part(number, count, row, len(span.tokens)))
        row += len(span.tokens)
    return parts


@dataclass(frozen=True)
class Ahead:
    """Chains that are being drafted after a verification whose results are not known: the `requests` as they
    are verified, and their `parts`, whose rows are those of all tokens that the verification may yield.
    `compiled` as ModelDrafter.compiled."""

    chains: ChainsInFlight
    requests: Sequence[DraftRequest]
    parts: Sequence[Part]
    compiled: bool

    def parts_of(self, requests: Sequence[DraftRequest], block_size: int) -> list[Part] | None:
        """Return the parts that follow the tokens of `requests`; None unless there is one for each."""
        verified = {
            request.id: (request, part) for request, part in zip(self.requests, self.parts, strict=True)
        }
        found = [
            _followed(request, *verified[request.id], block_size)
            for request in requests
            if request.id in verified
        ]
        parts = [part for part in found if part]
        return parts if len(parts) == len(requests) else None


def _followed(request: DraftRequest, before: DraftRequest, part: Part, block_size: int) -> Part | None:
    """Return the part that follows the tokens of `request`, if they are those of `before` and what its
    verification yielded, with their KV in the same blocks."""
    yielded, held = request.length - before.length, -(-request.length // block_size)
    same = before.epoch == request.epoch and before.blocks[:held] == request.blocks[:held]
    if not (same and request.computed >= before.length and 1 <= yielded <= part.count):
        return None
    return replace(part, count=yielded)
