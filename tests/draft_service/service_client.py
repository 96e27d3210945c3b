"""A client that calls a draft service directly, with a clock that the test sets."""

import itertools

from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import ServiceConfig, TargetReply
from streamserve.protocol.drafting import DRAFT_VERSION, Delta, DraftRequests, Drafts, Hello, Welcome, encode
from streamserve.protocol.sampling import SamplingParams
from tests.draft_service.star import IDENTITY, FakeDrafter

GREEDY = SamplingParams(temperature=0.0)


class ServiceClient:
    """Sends messages of several targets to one service. A draft pass takes `pass_seconds`."""

    def __init__(self, pass_seconds: float = 0.01, **config) -> None:
        self.config = ServiceConfig(**{"num_blocks": 100, **config})
        secrets = (number.to_bytes(16, "little") for number in itertools.count(1))
        self.service = Service(IDENTITY, self.config, lambda: next(secrets))
        self.drafter = FakeDrafter(self.config.num_blocks, self.config.block_size)
        self.pass_seconds = pass_seconds
        self.now = 0.0
        self.welcomes: dict[str, Welcome] = {}
        self.keys: dict[str, str] = {}
        self.numbers: dict[tuple[str, int], int] = {}

    def hello(self, name: str, key: str = "", **fields) -> TargetReply:
        hello = {"version": DRAFT_VERSION, "tokenizer": "t", "vocabulary": "v", "name": name, "nonce": 7}
        peer = name.encode()
        (out,) = self.service.heard(peer, Hello(**{**hello, **fields}), self.now, key)
        if isinstance(out.message, Welcome):
            self.welcomes[name] = out.message
            self.keys[name] = key
        return out

    def delta(self, name: str, tokens: list[int], sequence: int = 1, retained: int = 0, **fields) -> Delta:
        number = self.numbers.get((name, sequence), 0)
        self.numbers[name, sequence] = number + 1
        defaults = {
            "sequence": sequence, "epoch": 0, "number": number + 1, "base": number if retained else 0,
            "retained": retained, "tokens": tokens, "output": 0, "choice": 0, "depth": 4, "width": 1,
            "nodes": 4, "params": None if retained else GREEDY,
        }  # fmt: skip
        return Delta(**{**defaults, **fields})

    def request(self, name: str, *deltas: Delta, **fields) -> list[TargetReply]:
        if name not in self.welcomes:
            self.hello(name)
        welcome = self.welcomes[name]
        defaults = {"tag": welcome.tag, "channel": welcome.channel, "deltas": list(deltas)}
        message, peer, key = DraftRequests(**{**defaults, **fields}), name.encode(), self.keys[name]
        size = len(encode(message))
        refused = self.service.arrived(peer, size, self.now, key)
        return self.service.heard(peer, message, self.now, key) if refused is None else refused

    def draft_batch(self) -> list[str]:
        """Draft one batch; return the names of the targets that received answers, in order."""
        outs = self.draft_outputs()
        return [out.peer.decode() for out in outs if isinstance(out.message, Drafts)]

    def draft_outputs(self) -> list[TargetReply]:
        batch = self.service.loop.batch(self.now)
        if batch is None:
            return []
        trees = self.drafter.draft(batch)
        self.now += self.pass_seconds * max(1, max(request.depth for request in batch.requests))
        return self.service.loop.drafted(batch, trees, self.now)
