"""Drafts with draft services: the connections of draft_service/target/client.py. Implements
contracts.plan.Drafter.

begin ── deltas ──▶ service            the target continues: other requests' prompts, and steps without trees
collect ◀── trees ── service           waits while waiting pays, then takes the received trees
        ◀── trees ── fallback drafter  for sequences without a tree: late, slow, busy or unreachable service

Between steps `maintain` keeps the sessions open: a service is connected before the first request, and no
session expires while the target is idle.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import zmq

from streamserve.contracts.plan import Drafter, DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.target.client import DraftClient, TargetIdentity
from streamserve.draft_service.target.links import ServiceMessage
from streamserve.draft_service.target.waiting import Waiting
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.curve import Endpoint, KeyPair, parse_endpoints, read_key_pair
from streamserve.protocol.draft_kind import DraftKind, draft_kind
from streamserve.protocol.drafting import MAX_REPLY_BYTES, decode_to_target, encode
from streamserve.protocol.reports import RemoteReport
from streamserve.workers.draft_links import DraftLink, open_link
from streamserve.workers.zmtp import ProtocolError

logger = logging.getLogger(__name__)

FIRST_HANDSHAKE_SECONDS = 0.1
"""Time that each link may take for its handshake at the start."""
MAX_MESSAGES_AT_ONCE, MAX_BYTES_AT_ONCE = 64, 2 * MAX_REPLY_BYTES
"""Limits of the messages, and of their bytes, that are read from a service before the engine continues."""


def remote_drafter(config: WorkerConfig, vocab_size: int, fallback: Drafter) -> "RemoteDrafter | None":
    """Return the drafter for `--draft tcp://…`, or None for other settings.

    Raises CheckpointError if the target's tokenizer cannot be read, ValueError for an invalid key file.
    """
    model = config.model
    if draft_kind(model.draft) is not DraftKind.SERVICE:
        return None
    tokenizer, vocabulary = fingerprints(Path(model.path), vocab_size)
    own = read_key_pair(model.draft_key) if model.draft_key else None
    identity = TargetIdentity(tokenizer, vocabulary, config.worker, vocab_size)
    endpoints = parse_endpoints(model.draft)
    return RemoteDrafter(identity, endpoints, own, secrets.randbits(32), model.draft_model, fallback)


class RemoteDrafter:
    """Drafts with the services at `endpoints`; `own` is the key pair of this target.

    `fallback` drafts locally for sequences without a tree from a service.
    """

    group = None

    def __init__(
        self, identity: TargetIdentity, endpoints: Sequence[Endpoint], own: KeyPair | None, seed: int,
        models: Sequence[str] = (), fallback: Drafter | None = None,
    ) -> None:  # fmt: skip
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoints, self._own = endpoints, own
        self._poller = zmq.Poller()
        self._links: list[DraftLink | None] = [None for _ in endpoints]
        """The connection to each service; None while the service is on probation."""
        for number in range(len(endpoints)):
            self._connect(number, FIRST_HANDSHAKE_SECONDS)
        self.client = DraftClient(identity, [endpoint.address for endpoint in endpoints], seed, models)
        self.waiting = Waiting()
        self._collected: float | None = None
        self._had_trees = False
        self._lengths: dict[int, int] = {}
        """Lengths of the sequences in the latest `begin`: the returned trees continue them."""
        self._returned_trees: dict[int, TokenTree] = {}
        self._fallback = fallback
        self._fallback_returned: dict[int, TokenTree] = {}
        self._trees = self._accepted = self._fallback_trees = self._fallback_accepted = 0

    def maintain(self) -> None:
        """Read received messages and send the Hellos and Pings that are due.

        Must be called between steps, at least twice a second.
        """
        self._receive(0)
        now = time.monotonic()
        self._reconnect(now)
        self._send(self.client.tick(now))

    def foresee(self, requests: Sequence[DraftRequest]) -> None:
        """Let the services read these prompts before trees are requested for them."""
        self.client.sequences.foresee(requests)
        self._send(self.client.tick(time.monotonic()))

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Send new tokens to the services and request trees."""
        now = time.monotonic()
        if self._collected is not None:
            self.waiting.worked(now - self._collected, self._had_trees)
        self._learn(requests, now)
        self._receive(0)
        waiting = self.waiting
        self._reconnect(now)
        self._send(self.client.tick(now))
        self._send(
            self.client.begin(requests, now, waiting.max_wait, waiting.verify.value, waiting.plain.value)
        )
        if self._fallback:
            self._fallback.begin(requests)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        """Wait for the requested trees; return the trees that have arrived, by sequence id. The wait ends at
        `deadline`, or earlier when it has lasted as long as is worthwhile for the services' usual times."""
        self._receive(0)
        limits = {
            service: self.waiting.limit(service, usual) for service, usual in self.client.usual().items()
        }
        until = min(deadline, (now := time.monotonic()) + max(limits.values(), default=0.0))
        while now < until and self.client.sequences.outstanding(now, limits):
            self._receive(until - now)
            now = time.monotonic()
        self._returned_trees = self.client.sequences.pop_trees()
        self._fallback_returned = {}
        if self._fallback:
            others = self._fallback.collect(deadline)
            self._fallback_returned = {
                id: tree for id, tree in others.items() if id not in self._returned_trees
            }
        self._collected, self._had_trees = time.monotonic(), bool(self._returned_trees)
        return self._returned_trees | self._fallback_returned

    def release(self, ids: Sequence[int]) -> None:
        self.client.sequences.release(ids)
        if self._fallback:
            self._fallback.release(ids)

    def report(self) -> RemoteReport:
        """Return the counters so far."""
        return RemoteReport(
            services=sum(link.open for link in self.client.links),
            trees=self._trees,
            late=self.client.sequences.late,
            accepted=self._accepted,
            fallback_trees=self._fallback_trees,
            fallback_accepted=self._fallback_accepted,
            moves=self.client.placement.moves,
            rejected=dict(self.client.rejected),
            probations=sum(link.reputation.probations for link in self.client.links),
        )

    def close(self) -> None:
        """End the sessions and free the sockets."""
        self._send(self.client.close(time.monotonic()))
        for link in self._links:
            if link is not None:
                link.close(linger=200)
        self._context.term()

    def _learn(self, requests: Sequence[DraftRequest], now: float) -> None:
        """Update the acceptance statistics of the trees that were returned last."""
        lengths, self._lengths = self._lengths, {request.id: request.length for request in requests}
        for request in requests:
            new = request.tokens[lengths.get(request.id, 0) : request.length]
            tree = self._returned_trees.pop(request.id, None)
            if tree is not None:
                accepted = len(tree.follow(new)) - 1
                self.waiting.gained(accepted)
                self.client.gained(request.id, accepted, now)
                self._trees += 1
                self._accepted += accepted
            other = self._fallback_returned.pop(request.id, None)
            if other is not None:
                self._fallback_trees += 1
                self._fallback_accepted += len(other.follow(new)) - 1

    def _receive(self, seconds: float) -> None:
        """Process received messages; wait up to `seconds` for the first message."""
        if seconds and not any(link is not None and link.pending for link in self._links):
            self._poller.poll(max(0, round(seconds * 1000)))
        for number, link in enumerate(self._links):
            if link is None:
                continue
            try:
                self._receive_from(number, link)
            except ProtocolError as error:
                self.client.reject(number, "unreadable", str(error), time.monotonic())
                self._reconnect(time.monotonic())

    def _receive_from(self, number: int, link: DraftLink) -> None:
        """Process a limited number of messages of a service."""
        size = 0
        for message in islice(link.receive(), MAX_MESSAGES_AT_ONCE):
            size += len(message)
            self._hear(number, message)
            # A service on probation has no link any more: the rest of its messages is not even read.
            if size >= MAX_BYTES_AT_ONCE or self._links[number] is not link:
                break

    def _hear(self, number: int, data: bytes | memoryview) -> None:
        """Process a message of service `number`, valid or not."""
        now = time.monotonic()
        if self.client.size(number, len(data), now):
            try:
                message = decode_to_target(data)
            except msgspec.DecodeError as error:
                self.client.reject(number, "unreadable", str(error), now)
                self._reconnect(now)
                return
            try:
                self._send(self.client.heard(number, message, now))
            except Exception:  # a bug here that this service can trigger: it is no longer used
                logger.exception("failed to process an answer of draft service %d", number)
                self.client.reject(number, "internal", type(message).__name__, now, certain=True)
        self._reconnect(now)

    def _reconnect(self, now: float) -> None:
        """Close the connections of services on probation, so that their messages are not even read, and
        reopen them afterwards."""
        for number, service in enumerate(self.client.links):
            link = self._links[number]
            if service.on_probation(now):
                if link is not None:
                    self._poller.unregister(link.pollable)
                    link.close()
                    self._links[number] = None
            elif link is None:
                self._connect(number)

    def _send(self, outs: Sequence[ServiceMessage]) -> None:
        for out in outs:
            link = self._links[out.link]
            if link is not None and not link.send(encode(out.message)):
                self.client.unreachable(out.link, time.monotonic())

    def _connect(self, number: int, wait: float = 0.0) -> None:
        try:
            link = open_link(self._context, self._endpoints[number], self._own, wait)
        except (OSError, zmq.ZMQError) as error:  # no descriptor is left: it is tried again
            logger.warning("cannot connect to a draft service: %s", error)
            return
        self._links[number] = link
        self._poller.register(link.pollable, zmq.POLLIN)
