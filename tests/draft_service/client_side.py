"""A draft client with a clock that the test sets."""

import itertools

from streamserve.contracts.plan import DraftRequest
from streamserve.draft_service.target.client import DraftClient, TargetIdentity
from streamserve.protocol.drafting import Draft, Drafts, Hello, Tree, Welcome
from streamserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def welcome(nonce: int, tag: int, model: str = "draft") -> Welcome:
    return Welcome(
        nonce=nonce, tag=tag, channel=b"c", model=model, max_model_len=100, lease=9.0, max_bytes=9, active=0
    )


class Side:
    """A draft client with a clock that the test sets. `open` completes the handshake with its services."""

    def __init__(self, links: int = 1, **fields) -> None:
        addresses = [f"tcp://host{number}:1" for number in range(links)]
        self.client = DraftClient(TargetIdentity("t", "v", "me", 100), addresses, 1, **fields)
        self.now = 0.0
        self.texts: dict[int, list[int]] = {}
        self.tags = itertools.count(1)

    def open(self, *numbers: int) -> None:
        for out in self.client.tick(self.now):
            if isinstance(out.message, Hello) and out.link in (numbers or range(9)):
                self.client.heard(out.link, welcome(out.message.nonce, next(self.tags)), self.now)

    def begin(self, tokens, retained=0, epoch=0, params=GREEDY, depth=4, id=1) -> list:
        """Request a tree after a sequence that consists of its first `retained` tokens and `tokens`."""
        text = self.texts.setdefault(id, [])
        if retained < len(text):  # an edited sequence is a new list
            text = self.texts[id] = text[:retained]
        text += tokens
        request = DraftRequest(id, epoch, text, len(text), 0, 0, params, depth, 1, depth, 0, [])
        outs = self.client.begin([request], self.now, 0.1, 0.0, 0.0)
        return [(out.link, delta) for out in outs for delta in out.message.deltas]

    def answer(self, number: int, *draft_tokens: int, root: int, link: int = 0, epoch: int = 0) -> None:
        size = 1 + len(draft_tokens)
        tree = Tree((root, *draft_tokens), tuple(range(-1, size - 1)), (0.5,) * size, (1.0,) * size)
        tag = self.client.links[link].tag
        drafts = [Draft(1, epoch, number, tree)]
        message = Drafts(tag=tag, drafts=drafts, waited=0.0, seconds=0.01, queue=0.0)
        self.client.heard(link, message, self.now)

    def take(self) -> tuple[int, ...] | None:
        tree = self.client.sequences.pop_trees().get(1)
        return tree.tokens if tree else None
