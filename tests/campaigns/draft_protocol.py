"""The family `draft_protocol`: whatever clients send to a draft service, it lives and drafts for others as
before. What is sent is made in tests/fuzz/test_draft_service.py."""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from streamserve.protocol.drafting import Welcome, decode_to_target
from streamserve.speculation.tree import TokenTree
from streamserve.workers.remote_drafter import RemoteDrafter
from tests.campaigns.outcome import DEATH, TRACEBACK, WRONG_TEXT, Outcome, TrialFailure
from tests.campaigns.watching import first_fault
from tests.draft_service.network import Drafting, drafting
from tests.fuzz.test_draft_service import Guarded, Peer, honest, nonsense, raw_bytes, tree_for

MESSAGES = 200
PROMPTS = 5
QUIET_MILLISECONDS = 30
WELCOME_SECONDS = 5.0


class Trials:
    """Trials of MESSAGES messages each, to one service with keys."""

    def __init__(self, service: Drafting, guarded: Guarded) -> None:
        rng = random.Random(0)
        self._service, self._guarded = service, guarded
        self._drafter: RemoteDrafter = honest(service, guarded, guarded.other)
        self._prompts = [[rng.randrange(4, 300) for _ in range(rng.randint(1, 60))] for _ in range(PROMPTS)]
        self._asked = 0
        self._expected: list[TokenTree] = [self._tree(prompt) for prompt in self._prompts]
        self._seen = 0

    def trial(self, seed: int) -> Outcome:
        rng = random.Random(f"draft-{seed}")
        hostile = Peer(self._service, self._guarded, self._guarded.good)
        try:
            sent = self._send(rng, hostile)
            number = rng.randrange(PROMPTS)
            if self._tree(self._prompts[number]) != self._expected[number]:
                raise TrialFailure(WRONG_TEXT, f"the tree after prompt {number} is another")
        except AssertionError as error:
            raise TrialFailure(DEATH, f"{error}: {self._log()[-800:]}") from error
        finally:
            hostile.close()
        self._check()
        return Outcome(
            verdict="passed", counts={"messages": sent, "trees": 1, "hello_refused": int(not sent)}
        )

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._drafter.close()

    def _send(self, rng: random.Random, hostile: Peer) -> int:
        hostile.socket.setsockopt(zmq.LINGER, 1000)  # what is sent arrives, though it is left at once
        welcome = _welcome(hostile)
        for sent in range(MESSAGES):
            if not isinstance(welcome, Welcome):
                return sent
            hostile.socket.send(nonsense(rng, welcome), zmq.NOBLOCK)
            while hostile.socket.poll(0):
                decode_to_target(hostile.socket.recv())
        while hostile.socket.poll(QUIET_MILLISECONDS):  # the service has seen it all when it says no more
            decode_to_target(hostile.socket.recv())
        raw_bytes(self._service, rng)
        return MESSAGES

    def _tree(self, prompt: list[int]) -> TokenTree:
        self._asked += 1
        return tree_for(self._drafter, self._asked, prompt)

    def _check(self) -> None:
        if self._service.process.poll() is not None:
            raise TrialFailure(DEATH, self._log()[-800:])
        log = self._log()
        fault, self._seen = first_fault(log[self._seen :]), len(log)
        if fault:
            raise TrialFailure(TRACEBACK, fault)

    def _log(self) -> str:
        return "".join(self._service.lines)


def _welcome(hostile: Peer) -> object:
    """What the service says to a new session, once those of earlier trials have ended."""
    deadline = time.monotonic() + WELCOME_SECONDS
    while not isinstance(found := hostile.hello(), Welcome) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@contextmanager
def opened() -> Iterator[Trials]:
    """Set the family up."""
    with tempfile.TemporaryDirectory() as folder:
        guarded = Guarded(Path(folder))
        with drafting(str(guarded.checkpoint), *guarded.flags) as service:
            trials = Trials(service, guarded)
            try:
                yield trials
            finally:
                trials.close()
