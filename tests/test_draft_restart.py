"""A draft service whose worker dies or whose steps raise recovers, and targets continue."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import zmq

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree, chain
from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import ServiceConfig
from streamserve.draft_service.server.types import ServiceIdentity as OwnIdentity
from streamserve.draft_service.target.client import TargetIdentity
from streamserve.execution.drafters.fingerprints import fingerprints
from streamserve.protocol.curve import parse_endpoints
from streamserve.protocol.drafting_config import DraftingConfig
from streamserve.protocol.messages import Stop, encode
from streamserve.protocol.sampling import SamplingParams
from streamserve.workers.draft_runtime import ServiceRuntime
from streamserve.workers.draft_worker import listen
from streamserve.workers.remote_drafter import RemoteDrafter
from tests.checkpoints import make_checkpoint
from tests.draft_service.network import drafting
from tests.processes import workers_below

GREEDY = SamplingParams(temperature=0.0)
POISON = 66


def tree_for(
    drafter: RemoteDrafter, sequence: int, prompt: list[int], seconds: float = 30.0
) -> TokenTree | None:
    """Request the service's tree after a prompt until it is received."""
    request = DraftRequest(sequence, 0, prompt, len(prompt), 0, 0, GREEDY, 4, 1, 4, 0, [])
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        drafter.begin([request])
        if tree := drafter.collect(time.monotonic() + 0.5).get(sequence):
            drafter.release([sequence])
            return tree
        time.sleep(0.01)
    return None


def test_a_dead_worker_is_restarted_at_its_address(tmp_path) -> None:
    folder = make_checkpoint(tmp_path / "draft")
    with drafting(str(folder), "--threads", "1", "--num-blocks", "100") as service:
        tokenizer, vocabulary = fingerprints(folder, 320)
        identity = TargetIdentity(tokenizer, vocabulary, "me", 320)
        drafter = RemoteDrafter(identity, parse_endpoints(service.address), None, 1)
        expected = tree_for(drafter, 1, [5, 6, 7])
        assert expected is not None
        (worker,) = workers_below(service.process.pid)
        os.kill(worker.pid, signal.SIGKILL)
        assert tree_for(drafter, 2, [5, 6, 7]) == expected
        assert service.printed("its process ended with SIGKILL: restarting it")
        assert service.process.poll() is None
        drafter.close()


class Poisoned:
    """A drafter that raises an exception for one token."""

    group = None

    def __init__(self) -> None:
        self.raised = 0
        self._trees: dict[int, TokenTree] = {}
        self._tokens: dict[int, list[int]] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if POISON in request.tokens:
                self.raised += 1
                raise RuntimeError("a token that raises")
        self._trees = {request.id: chain([request.tokens[request.length - 1], 1, 2]) for request in requests}

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return self._trees

    def release(self, ids: Sequence[int]) -> None:
        pass


class Running:
    """The threads of a service in this process, with a drafter that raises."""

    def __init__(self) -> None:
        self.no_secrets = False
        self.context = zmq.Context()
        self.parent, child = self.context.socket(zmq.DEALER), self.context.socket(zmq.DEALER)
        self.parent.bind("inproc://parent")
        child.connect("inproc://parent")
        identity = OwnIdentity(model="m", tokenizer="t", vocabulary="v", vocab_size=320, max_model_len=512)
        self.service = Service(identity, ServiceConfig(num_blocks=200, keep_warm="never"), self.secret)
        self.listener = listen(self.context, DraftingConfig(listen="tcp://127.0.0.1:0"))
        self.drafter = Poisoned()
        self.runtime = ServiceRuntime(self.service, self.listener, child, self.context)
        self.runtime.start()
        self.thread = threading.Thread(target=self.runtime.draft, args=(self.drafter,))
        self.thread.start()
        self._child = child

    def secret(self) -> bytes:
        if self.no_secrets:
            raise RuntimeError("there are no more")
        return os.urandom(16)

    def end(self) -> None:
        self.parent.send(encode(Stop()))
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.runtime.stop()
        self.listener.close()
        for socket in (self.parent, self._child):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.end()


def target(running: Running, name: str) -> RemoteDrafter:
    return RemoteDrafter(
        TargetIdentity("t", "v", name, 320), parse_endpoints(running.listener.address), None, 1
    )


def test_steps_that_raise_only_affect_their_session(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    poisoned, good = target(running, "poisoned"), target(running, "good")
    with caplog.at_level(logging.ERROR):
        assert tree_for(good, 1, [5, 6]) is not None
        for number in range(3):
            assert tree_for(poisoned, number, [5, POISON], seconds=0.4) is None
            tree = tree_for(good, 10 + number, [5, 6, 7 + number])
            assert tree is not None
            assert tree.tokens == (7 + number, 1, 2)
    assert running.drafter.raised
    assert running.thread.is_alive()
    assert "drafting a batch failed" in caplog.text
    assert running.service.statistics.counters.refused["drafting"]
    assert running.service.memory.pool.free >= 190
    for drafter in (poisoned, good):
        drafter.close()


def test_a_message_that_raises_only_affects_itself(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """A message that raises an exception, here while a secret is created, affects no other message."""
    good = target(running, "good")
    assert tree_for(good, 1, [5, 6]) is not None
    running.no_secrets = True
    with caplog.at_level(logging.ERROR):
        other = target(running, "other")
        assert tree_for(other, 1, [5, 6], seconds=1.0) is None
        assert tree_for(good, 2, [5, 8]) is not None
    assert "processing a message failed" in caplog.text
    assert running.service.statistics.counters.refused["internal"] >= 1
    for drafter in (good, other):
        drafter.close()
