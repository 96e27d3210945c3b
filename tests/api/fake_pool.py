"""A pool of models for tests of models that are loaded on demand."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamserve.protocol.errors import RequestError

SIZE = 1000
"""Bytes of a fake model's weights."""


@dataclass
class FakeState:
    """A model in a fake pool."""

    state: str = "not loaded"
    size: int = SIZE
    loads: int = 0
    unloads: int = 0
    load_seconds: float = 0.5


@dataclass
class FakePool:
    """A pool that loads models at once while `open` is set, and counts the users of each."""

    models: Mapping[str, FakeState]
    budget: int = SIZE
    used: int = 0
    users: Counter[str] = field(default_factory=Counter)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def acquire(self, name: str, patient: bool = False) -> None:
        state = self.models[name]
        if state.state != "loaded":
            await self.open.wait()
            state.state, state.loads = "loaded", state.loads + 1
        self.users[name] += 1

    def release(self, name: str) -> None:
        self.users[name] -= 1

    def unload(self, name: str) -> None:
        if self.users[name]:
            raise RequestError("in use", status=409)
        self.models[name].state = "not loaded"
