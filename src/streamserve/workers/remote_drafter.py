"""The sockets of a target's draft service client: contracts.plan.Drafter on top of
draft_service/target/client.py.

begin ── deltas ──▶ service            the target continues: other requests' prompts, and steps without trees
collect ◀── trees ── service           waits as long as it pays, then takes the received trees
        ◀── trees ── fallback drafter  for sequences without a tree: late, slow, busy or unreachable service

Between steps `maintain` keeps the sessions open: a service is connected before the first request, and no
session expires while the target is idle.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from streamserve.contracts.plan import Drafter, DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.target.client import Client, Identity
from streamserve.draft_service.target.links import Out
from streamserve.draft_service.target.waiting import Waiting
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.curve import Endpoint, KeyPair, parse_endpoints, read_key_pair
from streamserve.protocol.drafting import MAX_REPLY_BYTES, decode_to_target, encode
from streamserve.protocol.reports import RemoteReport

logger = logging.getLogger(__name__)

HEARTBEAT_MILLISECONDS = 2000
MAX_MESSAGES_AT_ONCE, MAX_BYTES_AT_ONCE = 64, 2 * MAX_REPLY_BYTES
"""Limits of messages, and bytes of them, read from a service before the engine continues."""
QUEUED = 32
"""Messages of a service in the receive queue; beyond it, TCP flow control holds the service back."""


def remote_drafter(config: WorkerConfig, vocab_size: int, fallback: Drafter) -> "RemoteDrafter | None":
    """Return the drafter for `--draft tcp://…`, or None for other settings. Raises CheckpointError if the
    target's tokenizer cannot be read, ValueError for an invalid key file."""
    model = config.model
    if not model.draft.startswith("tcp://"):
        return None
    tokenizer, vocabulary = fingerprints(Path(model.path), vocab_size)
    own = read_key_pair(model.draft_key) if model.draft_key else None
    identity = Identity(tokenizer, vocabulary, config.worker, vocab_size)
    endpoints = parse_endpoints(model.draft)
    return RemoteDrafter(identity, endpoints, own, secrets.randbits(32), model.draft_model, fallback)


class RemoteDrafter:
    """Drafts at the services at `endpoints`; `own` is the key pair of this target. `fallback`, the fallback
    drafter, drafts locally for sequences without a tree from a service."""

    group = None

    def __init__(
        self, identity: Identity, endpoints: Sequence[Endpoint], own: KeyPair | None, seed: int,
        models: Sequence[str] = (), fallback: Drafter | None = None,
    ) -> None:  # fmt: skip
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoints, self._own = endpoints, own
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes] | None] = [None for _ in endpoints]
        for number in range(len(endpoints)):
            self._connect(number)
        self.client = Client(identity, [endpoint.address for endpoint in endpoints], seed, models)
        self.waiting = Waiting()
        self._collected: float | None = None
        self._had_trees = False
        self._lengths: dict[int, int] = {}
        """Lengths of the sequences in the latest `begin`, after which trees were returned."""
        self._returned_trees: dict[int, TokenTree] = {}
        self._fallback = fallback
        self._fallback_returned: dict[int, TokenTree] = {}
        self._trees = self._accepted = self._fallback_trees = self._fallback_accepted = 0

    def maintain(self) -> None:
        """Read received messages and send the Hellos and Pings that are due. Called between steps, at least
        twice a second."""
        self._receive(0)
        now = time.monotonic()
        self._reconnect(now)
        self._send(self.client.tick(now))

    def foresee(self, requests: Sequence[DraftRequest]) -> None:
        """Let the services read these prompts before trees are requested for them."""
        self.client.foresee(requests)
        self._send(self.client.tick(time.monotonic()))

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        """Sync the services and request trees."""
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
        """Return the trees that arrive within the time for which waiting pays, and by `deadline`."""
        self._receive(0)
        limits = {
            service: self.waiting.limit(service, usual) for service, usual in self.client.usual().items()
        }
        until = min(deadline, (now := time.monotonic()) + max(limits.values(), default=0.0))
        while now < until and self.client.outstanding(now, limits):
            self._receive(until - now)
            now = time.monotonic()
        self._returned_trees = self.client.take()
        self._fallback_returned = {}
        if self._fallback:
            others = self._fallback.collect(deadline)
            self._fallback_returned = {
                id: tree for id, tree in others.items() if id not in self._returned_trees
            }
        self._collected, self._had_trees = time.monotonic(), bool(self._returned_trees)
        return self._returned_trees | self._fallback_returned

    def release(self, ids: Sequence[int]) -> None:
        self.client.release(ids)
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
        for socket in self._sockets:
            if socket is not None:
                socket.close(linger=200)
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
        """Process received messages; wait up to `seconds` for the first."""
        ready = self._poller.poll(max(0, round(seconds * 1000)) if seconds else 0)
        for ready_socket, _ in ready:
            socket: zmq.Socket[bytes] = ready_socket
            number, size = self._sockets.index(socket), 0
            for _ in range(MAX_MESSAGES_AT_ONCE):
                if size >= MAX_BYTES_AT_ONCE or self._sockets[number] is not socket:
                    break
                try:
                    frame = socket.recv(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                size += len(frame)
                self._hear(number, frame)

    def _hear(self, number: int, frame: zmq.Frame) -> None:
        """Process a message of service `number`, valid or not."""
        now = time.monotonic()
        if self.client.size(number, len(frame), now):
            try:
                message = decode_to_target(frame.bytes)
            except msgspec.DecodeError as error:
                self.client.reject(number, "unreadable", str(error), now)
                self._reconnect(now)
                return
            try:
                self._send(self.client.heard(number, message, now))
            except Exception:  # a bug here that this service can trigger: it is not used any more
                logger.exception("failed to process an answer of draft service %d", number)
                self.client.reject(number, "internal", type(message).__name__, now, certain=True)
        self._reconnect(now)

    def _reconnect(self, now: float) -> None:
        """Close the connections of services on probation, so that their messages are not even read, and
        reopen them afterwards."""
        for number, link in enumerate(self.client.links):
            socket = self._sockets[number]
            if link.on_probation(now):
                if socket is not None:
                    self._poller.unregister(socket)
                    socket.close(linger=0)
                    self._sockets[number] = None
            elif socket is None:
                self._connect(number)

    def _send(self, outs: Sequence[Out]) -> None:
        for out in outs:
            socket = self._sockets[out.link]
            try:
                if socket is not None:
                    socket.send(encode(out.message), zmq.NOBLOCK)
            except zmq.ZMQError:  # not connected, or the send queue is full
                self.client.unreachable(out.link, time.monotonic())

    def _connect(self, number: int) -> None:
        endpoint, own = self._endpoints[number], self._own
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.setsockopt(zmq.RCVHWM, QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS)
        if endpoint.server_key is not None:
            assert own is not None, "settings see to that"
            socket.setsockopt(zmq.CURVE_SERVERKEY, endpoint.server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        socket.connect(endpoint.address)
        self._sockets[number] = socket
        self._poller.register(socket, zmq.POLLIN)
