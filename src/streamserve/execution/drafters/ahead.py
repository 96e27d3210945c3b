"""Chains that are drafted before the host knows the tokens that precede them.

    host     launch verification n, draft n + 1 | results of n, plan, launch verification n + 1 | results …
    device   ██████████████ verification n ██████████████ draft n + 1 █████████ verification n + 1 ███████

The drafter reads rows for all tokens that the verification may yield. Rows of tokens that were not accepted
are padding after the valid ones, and their KV is overwritten later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamserve.contracts.plan import DraftRequest, Span
from streamserve.execution.drafters.chains import ChainsInFlight


@dataclass(frozen=True)
class ChainPart:
    """The part of one tree in chains that are drafted together: the chain's `number` and its `levels`. The
    `count` rows from `row` on have the hidden states of the tokens read before the chain."""

    number: int
    levels: int
    row: int
    count: int


def parts_of(spans: Sequence[Span], levels: Sequence[int]) -> list[ChainPart]:
    """Return the parts of chains that are drafted together: one chain after each span, with `levels[i]`
    levels after the i-th span."""
    parts, row = [], 0
    for number, (span, count) in enumerate(zip(spans, levels, strict=True)):
        parts.append(ChainPart(number, count, row, len(span.tokens)))
        row += len(span.tokens)
    return parts


@dataclass(frozen=True)
class Ahead:
    """Chains that are being drafted after a verification whose results are not known yet. `requests` are the
    verified requests. The rows of their `parts` are the rows of all tokens that the verification may yield.
    `compiled`: whether drafting compiled or captured something."""

    chains: ChainsInFlight
    requests: Sequence[DraftRequest]
    parts: Sequence[ChainPart]
    compiled: bool

    def parts_of(self, requests: Sequence[DraftRequest], block_size: int) -> list[ChainPart] | None:
        """Return the parts that continue the tokens of `requests`; None unless each request has one."""
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


def _followed(
    request: DraftRequest, before: DraftRequest, part: ChainPart, block_size: int
) -> ChainPart | None:
    """Return the part for `request`, with the rows of the tokens that the verification of `before` yielded.
    None unless `request` is `before` with just these tokens added, and its KV in the same blocks."""
    yielded, held = request.length - before.length, -(-request.length // block_size)
    same = before.epoch == request.epoch and before.blocks[:held] == request.blocks[:held]
    if not (same and request.computed >= before.length and 1 <= yielded <= part.count):
        return None
    return replace(part, count=yielded)
