"""A service spoken to directly, with the time in hand."""

import itertools

from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import Out, ServiceConfig
from streamserve.protocol.drafting import DRAFT_VERSION, Ask, Delta, Drafts, Hello, Welcome, encode
from streamserve.protocol.sampling import SamplingParams
from tests.draft_service.star import IDENTITY, PretendedDrafter

GREEDY = SamplingParams(temperature=0.0)


class Talk:
    """`pass_seconds` is what a draft pass takes."""

    def __init__(self, pass_seconds: float = 0.01, **config) -> None:
        self.config = ServiceConfig(**{"num_blocks": 100, **config})
        secrets = (number.to_bytes(16, "little") for number in itertools.count(1))
        self.service = Service(IDENTITY, self.config, lambda: next(secrets))
        self.drafter = PretendedDrafter(self.config.num_blocks, self.config.block_size)
        self.pass_seconds = pass_seconds
        self.now = 0.0
        self.welcomes: dict[str, Welcome] = {}
        self.keys: dict[str, str] = {}
        self.numbers: dict[tuple[str, int], int] = {}

    def hello(self, name: str, key: str = "", **fields) -> Out:
        hello = {"version": DRAFT_VERSION, "tokenizer": "t", "vocabulary": "v", "name": name, "nonce": 7}
        peer = name.encode()
        (out,) = self.service.heard(peer, Hello(**{**hello, **fields}), self.now, key)
        if isinstance(out.message, Welcome):
            self.welcomes[name] = out.message
            self.keys[name] = key
        return out

    def delta(self, name: str, tokens: list[int], sequence: int = 1, keep: int = 0, **fields) -> Delta:
        number = self.numbers.get((name, sequence), 0)
        self.numbers[name, sequence] = number + 1
        given = {
            "sequence": sequence, "epoch": 0, "number": number + 1, "base": number if keep else 0,
            "keep": keep, "tokens": tokens, "output": 0, "choice": 0, "depth": 4, "width": 1, "nodes": 4,
            "params": None if keep else GREEDY,
        }  # fmt: skip
        return Delta(**{**given, **fields})

    def ask(self, name: str, *deltas: Delta, **fields) -> list[Out]:
        if name not in self.welcomes:
            self.hello(name)
        welcome = self.welcomes[name]
        ask = {"tag": welcome.tag, "channel": welcome.channel, "deltas": list(deltas)}
        message, peer, key = Ask(**{**ask, **fields}), name.encode(), self.keys[name]
        size = len(encode(message))
        refused = self.service.arrived(peer, size, self.now, key)
        return self.service.heard(peer, message, self.now, key) if refused is None else refused

    def turn(self) -> list[str]:
        """Draft one batch; the names of those who were answered, in order."""
        outs = self.turn_outs()
        return [out.peer.decode() for out in outs if isinstance(out.message, Drafts)]

    def turn_outs(self) -> list[Out]:
        batch = self.service.batch(self.now)
        if batch is None:
            return []
        trees = self.drafter.draft(batch)
        self.now += self.pass_seconds * max(1, max(request.depth for request in batch.requests))
        return self.service.drafted(batch, trees, self.now)
