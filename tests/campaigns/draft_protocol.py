"""The family `draft_protocol`: after arbitrary messages a draft service runs, and drafts for other clients as
before. The messages are made in tests/fuzz/test_draft_service.py."""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from streamserve.contracts.tree import TokenTree
from streamserve.protocol.drafting import Welcome, decode_to_target
from streamserve.workers.remote_drafter import RemoteDrafter
from tests.campaigns.outcome import DEATH, TRACEBACK, WRONG_TEXT, Outcome, TrialFailure
from tests.campaigns.process_output import first_fault
from tests.draft_service.network import Drafting, drafting
from tests.fuzz.draft_peers import KeyedService, Peer, honest_drafter, nonsense, raw_bytes, tree_for

MESSAGES = 200
PROMPTS = 5
QUIET_MILLISECONDS = 30
WELCOME_SECONDS = 5.0


class Trials:
    """Trials of MESSAGES messages each, to one service with keys."""

    def __init__(self, service: Drafting, keyed_service: KeyedService) -> None:
        rng = random.Random(0)
        self._service, self._guarded = service, keyed_service
        self._drafter: RemoteDrafter = honest_drafter(service, keyed_service, keyed_service.other)
        self._prompts = [[rng.randrange(4, 300) for _ in range(rng.randint(1, 60))] for _ in range(PROMPTS)]
        self._request_id = 0
        self._expected: list[TokenTree] = [self._tree(prompt) for prompt in self._prompts]
        self._seen = 0

    def trial(self, seed: int) -> Outcome:
        rng = random.Random(f"draft-{seed}")
        attacker = Peer(self._service, self._guarded, self._guarded.good)
        try:
            sent = self._send(rng, attacker)
            number = rng.randrange(PROMPTS)
            if self._tree(self._prompts[number]) != self._expected[number]:
                raise TrialFailure(WRONG_TEXT, f"the tree after prompt {number} is another")
        except AssertionError as error:
            raise TrialFailure(DEATH, f"{error}: {self._log()[-800:]}") from error
        finally:
            attacker.close()
        self._check()
        return Outcome(
            verdict="passed", counts={"messages": sent, "trees": 1, "hello_refused": int(not sent)}
        )

    def figures(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._drafter.close()

    def _send(self, rng: random.Random, attacker: Peer) -> int:
        # Messages arrive although the client disconnects at once.
        attacker.socket.setsockopt(zmq.LINGER, 1000)
        welcome = _welcome(attacker)
        for sent in range(MESSAGES):
            if not isinstance(welcome, Welcome):
                return sent
            attacker.socket.send(nonsense(rng, welcome), zmq.NOBLOCK)
            while attacker.socket.poll(0):
                decode_to_target(attacker.socket.recv())
        # The service has handled all messages when it sends nothing more.
        while attacker.socket.poll(QUIET_MILLISECONDS):
            decode_to_target(attacker.socket.recv())
        raw_bytes(self._service, rng)
        return MESSAGES

    def _tree(self, prompt: list[int]) -> TokenTree:
        self._request_id += 1
        return tree_for(self._drafter, self._request_id, prompt)

    def _check(self) -> None:
        if self._service.process.poll() is not None:
            raise TrialFailure(DEATH, self._log()[-800:])
        log = self._log()
        fault, self._seen = first_fault(log[self._seen :]), len(log)
        if fault:
            raise TrialFailure(TRACEBACK, fault)

    def _log(self) -> str:
        return "".join(self._service.lines)


def _welcome(attacker: Peer) -> object:
    """Return the service's reply to a new session, after the sessions of earlier trials have ended."""
    deadline = time.monotonic() + WELCOME_SECONDS
    while not isinstance(reply := attacker.hello(), Welcome) and time.monotonic() < deadline:
        time.sleep(0.05)
    return reply


@contextmanager
def open_campaign() -> Iterator[Trials]:
    """Set the family up."""
    with tempfile.TemporaryDirectory() as folder:
        keyed_service = KeyedService(Path(folder))
        with drafting(str(keyed_service.checkpoint), *keyed_service.flags) as service:
            trials = Trials(service, keyed_service)
            try:
                yield trials
            finally:
                trials.close()
