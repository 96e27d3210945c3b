"""A real target with hostile draft services generates the same text, and does not crash."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from streamserve.protocol.drafting import MAX_REPLY_BYTES, Drafts, Hello, Unknown, decode_to_service, encode
from tests.conftest import Scale
from tests.drafting import all_answers, local_texts, make_requests, make_target_and_draft, targets
from tests.fuzz.draft_messages import HostileService
from tests.fuzz.zmtp import INVALID_OPENINGS, handshakes
from tests.processes import workers_below

SERVICES = 12
"""Number of hostile services that a target knows. While some are on probation it uses the others."""
SECONDS, FULL_SECONDS = 1, 90
STARTS = 12
"""Maximum number of targets that are started until enough replies were seen."""
"""Duration of the requests, in a small run and in a full one."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_target_and_draft(tmp_path_factory.mktemp("pair"))


class Services(threading.Thread):
    """Hostile services, each on a separate port; `kinds` has the behaviour of each. All randomness comes from
    `seed`."""

    def __init__(self, seed: int, kinds: list[str]) -> None:
        super().__init__(daemon=True)
        self.received = self.sent = 0
        self.connections = 0
        self._over = threading.Event()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._services: dict[object, tuple[zmq.Socket[bytes], str, HostileService]] = {}
        self._raw: list[socket.socket] = []
        self._rng = random.Random(seed)
        addresses = [self._add(kind, seed + number) for number, kind in enumerate(kinds)]
        self.address = ",".join(addresses)

    def _add(self, kind: str, seed: int) -> str:
        if kind == "raw":
            raw = socket.create_server(("127.0.0.1", 0))
            raw.setblocking(False)
            self._raw.append(raw)
            return f"tcp://127.0.0.1:{raw.getsockname()[1]}"
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, 100)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        self._poller.register(router, zmq.POLLIN)
        self._services[router] = (router, kind, HostileService(random.Random(seed), 0.3))
        return f"tcp://127.0.0.1:{port}"

    def run(self) -> None:
        connections_open: list[socket.socket] = []
        while not self._over.is_set():
            for ready, _ in self._poller.poll(10):
                router, kind, service = self._services[ready]
                peer, *parts = router.recv_multipart()
                self._answer(router, peer, parts[-1], kind, service)
            for raw in self._raw:
                try:
                    connection, _ = raw.accept()
                except BlockingIOError:
                    continue
                self.connections += 1
                openings = [*INVALID_OPENINGS, *handshakes().values(), self._rng.randbytes(200)]
                with_garbage = self._rng.choice(openings) + self._rng.randbytes(self._rng.randrange(50))
                try:
                    connection.sendall(with_garbage)
                except OSError:
                    connection.close()
                connections_open.append(connection)
        for opened in [*connections_open, *self._raw]:
            opened.close()

    def _answer(
        self, router: zmq.Socket[bytes], peer: bytes, data: bytes, kind: str, service: HostileService
    ) -> None:
        self.received += 1
        try:
            message = decode_to_service(data)
        except msgspec.DecodeError as error:
            raise AssertionError("the target sent an invalid message") from error
        replies = service.replies(message)
        if kind == "flood" and not isinstance(message, Hello):
            nothing = Drafts(tag=service.tag, drafts=[], waited=0.0, seconds=0.0, queue=0.0)
            replies += [encode(nothing)] * 30_000
        elif kind == "huge" and not isinstance(message, Hello):
            replies.append(bytes(self._rng.choice((MAX_REPLY_BYTES - 1, MAX_REPLY_BYTES + 1))))
        elif kind == "forgetful" and not isinstance(message, Hello):
            replies = [encode(Unknown(service.tag))]
        for reply in replies:
            try:
                router.send_multipart([peer, reply], zmq.NOBLOCK)
                self.sent += 1
            except zmq.ZMQError:
                return

    def end(self) -> None:
        self._over.set()
        self.join(20)
        for router in self._services:
            router.close()  # type: ignore[attr-defined]
        self._context.term()


@contextmanager
def hostile(seed: int, kinds: list[str]) -> Iterator[Services]:
    services = Services(seed, kinds)
    services.start()
    try:
        yield services
    finally:
        services.end()


KINDS = ["wrong"] * SERVICES + ["flood", "huge", "forgetful", "raw"]


@pytest.mark.timeout(900)
async def test_text_is_the_same_among_hostile_services(
    pair: tuple[str, str], scale: Scale, record: Callable[..., None]
) -> None:
    """Text is the same among hostile services. Rounds of requests run until the time is over; each minute a
    new target, without probations, starts."""
    target, _ = pair
    workload = make_requests(scale.pick(3, 8), scale.seed)
    texts, _ = local_texts(target, "none", workload)
    remaining = float(scale.pick(SECONDS, FULL_SECONDS))
    sums = {"rounds": 0, "rejected": 0, "probations": 0, "trees": 0, "said": 0, "starts": 0}
    faults: dict[str, int] = {}

    def enough() -> bool:
        """Return whether replies were refused for several reasons, and some were valid."""
        return sums["rejected"] > 5 and sums["trees"] > 0 and len(faults) > 2

    while remaining > 0 or (not enough() and sums["starts"] < STARTS):
        seed = scale.seed + sums["starts"]
        print(f"seed {seed}: requests of seed {scale.seed}")
        with hostile(seed, KINDS) as services:
            async with targets(target, 1, services.address) as llms:
                workers = children()
                started = time.monotonic()
                while time.monotonic() < started + max(SECONDS, min(remaining, 60.0)):
                    repeated, _ = await all_answers(llms, workload, f"round-{sums['rounds']}")
                    assert repeated == [texts], f"seed {seed}"
                    sums["rounds"] += 1
                remaining -= time.monotonic() - started
                report = llms[0].report()
                assert report is not None
                remote = report.remote
                assert remote is not None
                assert children() == workers, "the target's worker is the one that was started"
            sums["rejected"] += sum(remote.rejected.values())
            sums["probations"] += remote.probations
            sums["trees"] += remote.trees
            sums["said"] += services.sent
            sums["starts"] += 1
            for fault, count in remote.rejected.items():
                faults[fault] = faults.get(fault, 0) + count
    print(f"{sums}, by fault {faults}")
    assert enough(), "replies of several faults, and valid ones"
    record(**sums, faults=faults)


def children() -> set[int]:
    """Return the process ids of workers."""
    return {worker.pid for worker in workers_below(os.getpid())}
