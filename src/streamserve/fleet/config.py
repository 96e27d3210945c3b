"""The configuration of a fleet and its limits."""

from dataclasses import dataclass, field

from streamserve.fleet.worker_state import Topology
from streamserve.protocol.adapters import Adapter
from streamserve.scheduling.flowguard import FlowGuard
from streamserve.scheduling.routing import Router


@dataclass(frozen=True)
class FleetConfig:
    """`max_requests` limits the open requests, running and waiting. `max_waiting_tokens` limits the
    prompt tokens of the waiting ones; one request may always wait. A worker that shows no progress for
    `stuck_after` seconds counts as stuck. A request that ended its worker `max_attempts` times while it
    ran alone, or whose KV transfer failed as often, is not tried again. A decode worker that has all but
    `continue_tokens` tokens of a prompt cached, and more than the prefill worker, computes the rest
    itself. `slo_admission` is that of the workers: where a decode worker may refuse a request, its first
    token waits for the decision. `adapters` are loaded from the start. The `topology` is that of the
    start; there are at most `max_workers` workers, by default as many as there."""

    topology: Topology = field(default_factory=Topology)
    router: Router = field(default_factory=FlowGuard)
    max_requests: int = 1024
    max_waiting_tokens: int = 1 << 20
    stuck_after: float = 10.0
    max_attempts: int = 3
    continue_tokens: int = 64
    adapters: tuple[Adapter, ...] = ()
    slo_admission: bool = False
    max_workers: int | None = None

    @property
    def workers(self) -> int:
        """How many workers there can be."""
        return max(len(self.topology.names), self.max_workers or 0)
