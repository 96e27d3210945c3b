"""The families of campaigns by name."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.campaigns.outcome import Campaign, Outcome
from tests.dependencies import ROOT, content


@dataclass(frozen=True)
class Family:
    """A module with trials. `slice_minutes` is its duration in `make verify`."""

    module: str
    description: str
    slice_minutes: float = 0.5

    @property
    def file(self) -> str:
        """Return the module's file, relative to the repository."""
        return str(Path(find_spec(self.module).origin).relative_to(ROOT))  # type: ignore[union-attr, arg-type]

    def content(self) -> str:
        """Return a hash of the files that the trials depend on. Trials count while it stays the same."""
        return content(self.file)


FAMILIES = {
    "settings": Family(
        "tests.campaigns.settings",
        "random settings and workloads on real workers, against the text of a plain engine",
        2.0,
    ),
    "simulated_settings": Family(
        "tests.campaigns.simulated_settings",
        "random settings and workloads in virtual time, with every count checked after each step",
    ),
    "idle_streams": Family(
        "tests.campaigns.idle_streams",
        "engines in virtual time with prompt streams that lie idle, while others are to be served",
    ),
    "replies": Family(
        "tests.campaigns.replies",
        "replies of models in any pieces: the same blocks on three routes, and accepted when sent back",
    ),
    "http": Family("tests.campaigns.http", "hostile bytes and bodies on every HTTP route of a real server"),
    "websocket": Family("tests.campaigns.websocket", "hostile frames and calls on the prompt-stream socket"),
    "worker_protocol": Family(
        "tests.campaigns.worker_protocol", "forged messages between the fleet and a real worker, both ways"
    ),
    "draft_protocol": Family("tests.campaigns.draft_protocol", "hostile clients of a real draft service"),
    "join_protocol": Family(
        "tests.campaigns.join_protocol",
        "hostile bytes and messages where machines join, with and without keys",
    ),
    "machine_faults": Family(
        "tests.campaigns.machine_faults",
        "machines that are lost or slow at each lifecycle event of a request, in network namespaces",
        1.5,
    ),
    "agents": Family(
        "tests.campaigns.agents",
        "coding agents as their registries install them, against a server whose model writes a script",
    ),
    "levels": Family(
        "tests.campaigns.levels",
        "tests of execution, exactness and pairs as on processors with fewer instructions than this one",
        1.5,
    ),
    "soak": Family(
        "tests.campaigns.soak",
        "pairs with drafts, prompt streams and cancels; the slope of each process's memory",
        1.5,
    ),
}


@dataclass(frozen=True)
class _Plain:
    """A family that needs no setup."""

    run: Callable[[int], Outcome]

    def trial(self, seed: int) -> Outcome:
        return self.run(seed)

    def figures(self) -> dict[str, Any]:
        return {}


def open_campaign(family: Family) -> AbstractContextManager[Campaign]:
    """Set up a family, by its module's `open_campaign()` if it has one; otherwise its `trial` is used
    directly."""
    module = importlib.import_module(family.module)
    if hasattr(module, "open_campaign"):
        campaign: AbstractContextManager[Campaign] = module.open_campaign()
        return campaign
    return _plain(module.trial)


@contextmanager
def _plain(run: Callable[[int], Outcome]) -> Iterator[Campaign]:
    yield _Plain(run)
