"""Injected crashes: at the n-th lifecycle event of some kind, and when a poison request reaches a phase."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from streamserve.engine.observer import LifecycleEvent, Observer

PoisonPhase = Literal["prefill", "decode", "draft", "verify", "swap", "transfer"]
"""The phase in which a poison request crashes its worker:

- prefill: in a chunk of its prompt.
- decode: in a step for its next token.
- draft: while draft tokens are drafted for it.
- verify: while its draft tokens are verified.
- swap: while its KV is swapped.
- transfer: while its KV is sent to another worker.
"""

Fail = Callable[[str, bool], None]
"""Lets the worker with this name die (False) or fall silent (True), when the present action has returned."""


class InjectedCrash(Exception):
    """A worker crashed in the middle of an operation."""


@dataclass
class FaultInjection:
    """An injected crash: when `event` occurs for the `number`-th time at any worker, the `victims` die, or
    with `stop` are silent from then on. If the worker at which the event occurred is a victim, it does not
    continue its step."""

    event: LifecycleEvent
    number: int
    victims: tuple[str, ...]
    stop: bool = False


@dataclass(frozen=True)
class Poison:
    """A request that crashes every worker that reaches `phase` of a step with it. With `co_batched`, only
    workers that have other requests, too."""

    request: str
    phase: PoisonPhase
    co_batched: bool = False


class FaultInjector:
    """The injected crashes and poison requests of a simulation. Workers report the events and phases that
    they reach. It lets the victims `fail`, and raises InjectedCrash if the worker itself must not
    continue."""

    def __init__(self, fail: Fail) -> None:
        self._fail = fail
        self._faults: list[FaultInjection] = []
        self._poisons: list[Poison] = []
        self.injected: list[LifecycleEvent] = []
        """Lifecycle events at which injected crashes have occurred."""

    def inject(self, fault: FaultInjection) -> None:
        """Let workers die or become silent at a lifecycle event."""
        self._faults.append(fault)

    def poison(self, poison: Poison) -> None:
        """Let a request crash every worker that reaches some phase with it."""
        self._poisons.append(poison)

    def reach_event(self, worker: str, event: LifecycleEvent) -> None:
        """Crash the victims of a lifecycle event that `worker` has reached. Raises InjectedCrash if this
        worker is a victim."""
        for fault in [fault for fault in self._faults if fault.event == event]:
            fault.number -= 1
            if fault.number:
                continue
            self._faults.remove(fault)
            self.injected.append(event)
            for victim in fault.victims:
                self._fail(victim, fault.stop)
            if worker in fault.victims:
                raise InjectedCrash

    def reach_phase(self, worker: str, request: str, phase: PoisonPhase, alone: bool) -> None:
        """Crash `worker` if it has reached the phase of a poison request, and raise InjectedCrash. `alone`:
        it has no other request."""
        for poison in self._poisons:
            if (poison.request, poison.phase) == (request, phase) and not (poison.co_batched and alone):
                self._fail(worker, False)
                raise InjectedCrash


class FaultObserver(Observer):
    """Passes one worker's lifecycle events on to the fault injector."""

    def __init__(self, faults: FaultInjector, worker: str) -> None:
        self._faults = faults
        self._worker = worker

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        """Pass the event on. Raises InjectedCrash if the worker must not continue."""
        self._faults.reach_event(self._worker, name)
