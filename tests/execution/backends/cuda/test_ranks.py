"""The leader's calls reach the other ranks as plain data, and they execute the same calls."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import TokenTree
from streamserve.execution.backends.cuda.passes import Nodes
from streamserve.execution.backends.cuda.ranks import LeadingHostPool, LeadingRunner, Message, Swap, obey
from streamserve.execution.model.layout import lay_out

SIZE = 4
TREE = TokenTree((7, 8), (-1, 0), (0.0, 0.0), (1.0, 0.5), {0: np.ones(3, np.float32)})
SPANS = [
    Span(1, 0, [5, 6, 7], [2, 3], TREE, (0,), adapter="a"),
    Span(2, 9, [4], [0, 1, 5], TokenTree((4,), (-1,), (0.0,), (1.0,)), (0,), follows=True),
]


class Recorder:
    """A runner that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.cache = SimpleNamespace(block_size=SIZE)
        self.model = SimpleNamespace(
            spec=SimpleNamespace(hidden_size=3), dtype=torch.float32, device=torch.device("cpu")
        )

    def forward(self, layout: Any, sources: Any) -> torch.Tensor:
        parts = [(part.offset, part.span) for part in layout.parts]
        self.calls.append(
            ("forward", parts, layout.tokens.tolist(), layout.slots.tolist(), dict(sources or {}))
        )
        return torch.zeros(len(layout.tokens), 3)

    def sample(self, nodes: Nodes) -> torch.Tensor:
        arrays = {name: np.asarray(getattr(nodes, name)).tolist() for name in vars(nodes)}
        self.calls.append(("sample", arrays))
        return torch.zeros(1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(("logits", hidden.tolist()))
        return hidden

    def copy_blocks(self, copies: Any) -> None:
        self.calls.append(("copy", [tuple(pair) for pair in copies]))

    def move_slots(self, sources: Any, destinations: Any) -> None:
        self.calls.append(("move", sources.tolist(), destinations.tolist()))


class Shared:
    """Ranks whose broadcast passes the leader's tensors on directly."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.leads = True

    def share(self, x: torch.Tensor) -> None:
        if self.leads:
            self.tensors.append(x.clone())
        else:
            x.copy_(self.tensors.pop(0))


def test_a_rank_does_what_the_leader_is_asked_to_do() -> None:
    own, other, ranks = Recorder(), Recorder(), Shared()
    sent: list[bytes] = []
    children: Any = SimpleNamespace(send=lambda message: sent.append(msgspec.msgpack.encode(message)))
    leader = LeadingRunner(own, ranks, children)  # type: ignore[arg-type]
    leader.forward(lay_out(SPANS, SIZE), {2: 1})
    int32s = {name: np.arange(4, dtype=np.int32) for name in ("rows", "tokens", "parents", "slots")}
    draws = np.arange(44, dtype=np.int32).reshape(4, 11)
    leader.sample(Nodes(**int32s, firsts=np.array([0, 2, 4], np.int32), draws=draws, depth=3))
    leader.logits(torch.arange(6.0).view(2, 3))
    leader.copy_blocks([(1, 2)])
    leader.copy_blocks([])
    leader.move_slots(np.array([3, 4]), np.array([5, 6]))
    leader.move_slots(np.array([], np.int64), np.array([], np.int64))
    assert [call[0] for call in own.calls] == ["forward", "sample", "logits", "copy", "move"]
    ranks.leads = False
    for message in sent:
        obey(msgspec.msgpack.decode(message, type=Message), other, ranks, None)  # type: ignore[arg-type]
    assert other.calls == own.calls


def test_a_rank_swaps_the_blocks_that_the_leader_swaps(monkeypatch: Any) -> None:
    begun: list[tuple[str, Any, Any]] = []
    monkeypatch.setattr(LeadingHostPool, "__init__", lambda self, send: setattr(self, "_send", send))
    monkeypatch.setattr(
        LeadingHostPool.__base__, "begin", lambda self, out, back: begun.append(("leader", out, back))
    )
    host: Any = SimpleNamespace(begin=lambda out, back: begun.append(("rank", out, back)))
    pool = LeadingHostPool(lambda message: obey(message, None, None, host))  # type: ignore[call-arg, arg-type]
    pool.begin([(1, 2)], [(3, 4)])
    pool.begin([], [])
    assert begun == [("rank", [(1, 2)], [(3, 4)]), ("leader", [(1, 2)], [(3, 4)]), ("leader", [], [])]
    assert Swap in Message.__args__
