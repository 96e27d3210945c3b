"""A target without reachable draft services drafts by n-grams, and connects when services start."""

import logging
import time
from collections.abc import Iterator

import pytest
import zmq

from streamserve.contracts.plan import DraftRequest
from streamserve.draft_service.target.client import TargetIdentity
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.protocol.curve import parse_endpoints
from streamserve.protocol.drafting import (
    Draft,
    DraftRequests,
    Drafts,
    Hello,
    Tree,
    Welcome,
    decode_to_service,
    encode,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.workers.remote_drafter import RemoteDrafter

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def endpoint() -> Iterator[tuple[zmq.Socket, str]]:
    """Reserve the endpoint of a service that starts later."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        yield socket, f"tcp://127.0.0.1:{port}"


def make(address: str, seed: int = 1) -> RemoteDrafter:
    identity = TargetIdentity("t", "v", "me", 320)
    return RemoteDrafter(identity, parse_endpoints(address), None, seed, (), NGramDrafter())


def request(tokens: list[int], id: int = 1) -> DraftRequest:
    return DraftRequest(id, 0, tokens, len(tokens), 0, 0, GREEDY, 4, 1, 4, 0, [])


def hear(socket: zmq.Socket, drafter: RemoteDrafter) -> tuple[bytes, object]:
    """Return the next message of a target that calls `maintain`."""
    deadline = time.monotonic() + 10
    while not socket.poll(20):
        drafter.maintain()
        assert time.monotonic() < deadline, "no message arrived"
    peer, data = socket.recv_multipart()
    return peer, decode_to_service(data)


def test_without_trees_of_a_service_n_grams_draft(endpoint: tuple[zmq.Socket, str]) -> None:
    drafter = make("tcp://127.0.0.1:1")
    drafter.begin([request([5, 6, 7, 8, 5, 6])])
    trees = drafter.collect(time.monotonic() + 1.0)
    assert trees[1].tokens == (6, 7, 8, 5, 6)
    drafter.begin([request([5, 6, 7, 8, 5, 6, 7, 8, 9])])
    assert drafter.collect(time.monotonic() + 1.0) == {}, "token 9 never occurred before"
    report = drafter.report()
    assert (report.services, report.trees, report.accepted) == (0, 0, 0)
    assert (report.fallback_trees, report.fallback_accepted) == (1, 2)
    drafter.release([1])
    drafter.close()


def test_a_tree_of_a_service_takes_precedence_over_n_grams(endpoint: tuple[zmq.Socket, str]) -> None:
    socket, address = endpoint
    drafter = make(address)
    peer, hello = hear(socket, drafter)
    assert isinstance(hello, Hello), "before any request"
    welcome = Welcome(
        nonce=hello.nonce, tag=3, channel=b"c", model="m", max_model_len=99, lease=9.0, max_bytes=9, active=0
    )
    socket.send_multipart([peer, encode(welcome)])
    deadline = time.monotonic() + 10
    while not drafter.report().services:
        drafter.maintain()
        assert time.monotonic() < deadline
    drafter.begin([request([5, 6, 7, 8, 5, 6]), request([1, 2, 1, 2], id=2)])
    _, ask = hear(socket, drafter)
    while not isinstance(ask, DraftRequests):
        _, ask = hear(socket, drafter)
    assert [delta.sequence for delta in ask.deltas] == [1, 2]
    drafts = [
        Draft(1, 0, ask.deltas[0].number, Tree((6, 1, 2), (-1, 0, 1), (1.0, 0.9, 0.9), (1.0, 0.9, 0.8)))
    ]
    answer = Drafts(tag=3, drafts=drafts, waited=0.0, seconds=0.001, queue=0.0)
    socket.send_multipart([peer, encode(answer)])
    time.sleep(0.1)
    trees = drafter.collect(time.monotonic() + 0.2)
    assert trees[1].tokens == (6, 1, 2), "the tree is the service's"
    assert trees[2].tokens == (2, 1, 2), "the service's tree has not arrived"
    drafter.begin([request([5, 6, 7, 8, 5, 6, 1, 9])])
    report = drafter.report()
    assert (report.services, report.trees, report.accepted) == (1, 1, 1)
    drafter.close()


def test_an_absent_service_is_logged_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    drafter = make("tcp://127.0.0.1:1")
    deadline = time.monotonic() + 10
    with caplog.at_level(logging.WARNING):
        while "tcp://127.0.0.1:1 does not answer" not in caplog.text:
            drafter.maintain()
            time.sleep(0.02)
            assert time.monotonic() < deadline
    drafter.close()
