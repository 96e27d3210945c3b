"""A target's sequences: which tokens each draft service has of them, and the trees it has sent.

length   ────────────────────────────┐        of the engine's list of tokens
sent     ───────────────────────┐        the service has these tokens
at       ────────────────────┐           the tree begins after these
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.target.answers import LOST_IN_A_ROW, Fault, validated_tree
from streamserve.draft_service.target.rebase import rebase
from streamserve.protocol.drafting import Delta, Draft
from streamserve.protocol.sampling import SamplingParams

OVERDUE_FACTOR = 4.0
"""A request counts as lost after OVERDUE_FACTOR times the usual answer time, but not before
MIN_OVERDUE_SECONDS."""
MIN_OVERDUE_SECONDS = 0.25
PRIOR_ACCEPTED, MAX_EXPECTED = 8.0, 64.0
"""Prior of a sequence's acceptance ratio, in accepted tokens, and the number of expected tokens at which
older ones are halved."""


class WrongAnswerError(Exception):
    """An answer that no honest service sends, with its `fault`."""

    def __init__(self, fault: Fault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


@dataclass
class SyncedSequence:
    """A sequence: the first `length` of the engine's `tokens`. The service has the first `sent` of them.
    `tree` was received for the first `at` tokens."""

    params: SamplingParams
    epoch: int
    tokens: list[int]
    length: int
    number: int = 0
    base: int = 0
    sent: int = 0
    requested_at: float | None = None
    """When the request in flight was sent, for the first `requested_length` tokens."""
    requested_length: int = 0
    last_delta: Delta | None = None
    """The latest request."""
    lost: int = 0
    """How often the service reported the sequence as lost since its last tree."""
    tree: TokenTree | None = None
    at: int = 0
    ahead: DraftRequest | None = None
    """A request without a tree yet: the service may read its tokens ahead."""
    output: int = 0
    """Index of the sequence's next output token."""
    reach: int = 0
    """Number of the sequence's tokens, including the requested draft tokens."""
    service: int | None = None
    """The number of the service that drafts for the sequence."""
    active_at: float = float("-inf")
    """When the sequence's tokens were last sent to a service, or the sequence was placed at one."""
    better_checks: int = 0
    """Checks in a row in which another service was better."""
    drafted_by: int | None = None
    """The service that drafted the tree which the engine took last, until the tree is verified."""
    tree_of: int | None = None
    accepted: float = 0.0
    expected: float = 0.0
    """Accepted tokens of the sequence's trees, and the tokens expected from the means of the services that
    drafted these trees."""

    def sync(self, request: DraftRequest) -> None:
        """Update the tokens from the engine's request."""
        if request.epoch != self.epoch or request.length < self.length:
            # Sync the whole sequence: the service finds the unchanged prefix itself and retains its KV.
            self.epoch, self.params = request.epoch, needed_params(request.params)
            self.tree = None
            self.reset()
        self.tokens, self.length, self.output = request.tokens, request.length, request.output
        self.reach = request.length + request.nodes

    @property
    def ratio(self) -> float:
        """Accepted tokens of the sequence's trees, relative to the mean of the services that drafted these
        trees."""
        return (self.accepted + PRIOR_ACCEPTED) / (self.expected + PRIOR_ACCEPTED)

    def verified(self, accepted: int, expected: float) -> None:
        """Record the accepted tokens of a tree from a service whose mean is `expected`."""
        if self.expected > MAX_EXPECTED:
            self.accepted, self.expected = 0.5 * self.accepted, 0.5 * self.expected
        self.accepted += accepted
        self.expected += expected

    def reset(self) -> None:
        """Record that the service has no tokens of the sequence."""
        self.base = self.sent = 0
        self.requested_at = None

    def ready(self) -> TokenTree | None:
        """Return the part of the sequence's tree that follows its present tokens, or None."""
        if self.tree is None or not 0 < self.at <= self.length:
            return None
        if self.tree.tokens[0] != self.tokens[self.at - 1]:
            return None
        return rebase(self.tree, self.tokens[self.at : self.length])

    def may_request(self, usual: float, now: float) -> bool:
        """Return whether to request a tree: it has no usable tree and no request in flight. Answers take
        `usual` seconds."""
        if self.ready() is not None:
            return False
        overdue = max(OVERDUE_FACTOR * usual, MIN_OVERDUE_SECONDS)
        if self.requested_at is not None and now - self.requested_at > overdue:
            self.requested_at = None
        return self.requested_at is None

    def may_read_ahead(self) -> bool:
        """Return whether there are tokens that the service can read before a tree is requested."""
        return self.ahead is not None and self.requested_at is None and self.sent < self.length

    def delta(self, request: DraftRequest, now: float) -> Delta:
        """Return the message that syncs the sequence. With a depth above 0, the message also requests a
        tree."""
        self.number += 1
        # In a repeated request, the last token is sent twice.
        retained = min(self.sent, self.length - 1)
        delta = Delta(
            sequence=request.id,
            epoch=self.epoch,
            number=self.number,
            base=self.base,
            retained=retained,
            tokens=self.tokens[retained : self.length],
            output=request.output,
            choice=request.choice,
            depth=request.depth,
            width=request.width,
            nodes=request.nodes,
            expansion=request.expansion,
            params=None if self.base else self.params,
            need=request.need,
        )
        self.base, self.sent, self.active_at = self.number, self.length, now
        if request.depth:
            self.requested_at, self.requested_length, self.ahead = now, self.length, None
        self.last_delta = delta
        return delta

    def accept(self, draft: Draft, vocab_size: int, now: float) -> float | None:
        """Store the tree of an answer; return the seconds that the answer took, or None if it comes too late.
        Raises WrongAnswerError if the answer fits no request, or if its tree is invalid."""
        if self.last_delta is None:
            return None
        if draft.number > self.number or draft.number < 0:
            raise WrongAnswerError("foreign", "it answers a request that was never sent")
        if draft.number < self.number or self.requested_at is None or self.epoch != self.last_delta.epoch:
            return None
        if draft.epoch != self.epoch:
            raise WrongAnswerError("foreign", "it answers a request for another epoch of the sequence")
        seconds, self.requested_at = now - self.requested_at, None
        if draft.tree is not None:
            root = self.last_delta.tokens[-1]
            try:
                self.tree = validated_tree(draft.tree, root, self.last_delta, vocab_size)
            except ValueError as error:
                raise WrongAnswerError("tree", str(error)) from None
            self.at, self.lost, self.tree_of = self.requested_length, 0, self.service
        return seconds


class SyncedSequences:
    """All sequences of a target by id, and the engine's latest draft requests."""

    def __init__(self) -> None:
        self.late = 0
        self.used = 0
        self.by_id: dict[int, SyncedSequence] = {}
        self._requests: dict[int, DraftRequest] = {}
        self._released: dict[int, list[int]] = {}

    def sync(self, requests: Sequence[DraftRequest]) -> list[tuple[DraftRequest, SyncedSequence]]:
        """Store the latest requests; return each with its sequence."""
        self._requests = {request.id: request for request in requests}
        return [(request, self._sync(request)) for request in requests]

    def foresee(self, requests: Iterable[DraftRequest]) -> None:
        """Store prompts for which trees will be requested: services may read them ahead."""
        for request in requests:
            self._sync(request).ahead = request

    def outstanding(self, now: float, max_waits: Mapping[int, float]) -> list[int]:
        """Return the sequences of the latest requests that are worth waiting for: they have no usable tree
        yet, and their request was sent less than `max_waits[service]` seconds ago. A request that was waited
        for in vain is older, and is not waited for again."""
        return [
            id
            for id, request in self._requests.items()
            if (sequence := self.by_id[id]).requested_at is not None
            and sequence.service is not None
            and request.depth > 0
            and now - sequence.requested_at < max_waits.get(sequence.service, 0.0)
            and sequence.ready() is None
        ]

    def pop_trees(self) -> dict[int, TokenTree]:
        """Return the trees received for the latest requests."""
        trees = {}
        for id, request in self._requests.items():
            sequence = self.by_id[id]
            tree = sequence.ready()
            if tree is None or not request.depth:
                continue
            self.used += 1
            self.late += sequence.at < sequence.length
            trees[id] = tree
            sequence.tree, sequence.drafted_by = None, sequence.tree_of
        self._requests = {}
        return trees

    def services(self) -> set[int]:
        """Return the numbers of the services of the latest requests."""
        services = (self.by_id[id].service for id in self._requests)
        return {service for service in services if service is not None}

    def release(self, ids: Iterable[int]) -> None:
        """Forget these sequences; `take_released` returns them."""
        for id in ids:
            sequence = self.by_id.pop(id, None)
            if sequence is not None and sequence.service is not None:
                self._released.setdefault(sequence.service, []).append(id)

    def take_released(self, service: int) -> list[int]:
        """Return the sequences that a service may forget."""
        return self._released.pop(service, [])

    def lose(self, service: int, names: Iterable[int]) -> Iterator[int]:
        """Record that a service has lost the state of these sequences; sequences with a request in flight are
        synced again. Yield each sequence that was lost more than LOST_IN_A_ROW times without a tree."""
        in_flight = [
            name
            for name in names
            if (known := self.by_id.get(name)) and known.service == service and known.requested_at is not None
        ]
        for name in in_flight:
            self.by_id[name].reset()
        for name in in_flight:
            sequence = self.by_id[name]
            sequence.lost += 1
            if sequence.lost > LOST_IN_A_ROW:
                sequence.lost = 0
                yield name

    def _sync(self, request: DraftRequest) -> SyncedSequence:
        sequence = self.by_id.get(request.id)
        if sequence is None:
            sequence = SyncedSequence(
                needed_params(request.params), request.epoch, request.tokens, request.length
            )
            self.by_id[request.id] = sequence
        sequence.sync(request)
        return sequence


def needed_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters that a drafter needs. Grammars and log-probabilities are not needed; stop strings
    are private to the target."""
    return msgspec.structs.replace(params, grammar=None, stop=(), logprobs=None, prompt_logprobs=None, n=1)
