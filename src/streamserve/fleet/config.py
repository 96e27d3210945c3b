"""The configuration of a fleet and its limits."""

from dataclasses import dataclass, field

from streamserve.fleet.worker_state import Topology
from streamserve.protocol.adapters import Adapter
from streamserve.scheduling.flowguard import FlowGuard
from streamserve.scheduling.routing import Router


@dataclass(frozen=True)
class FleetConfig:
    """The configuration of a fleet.

    - `topology`, `max_workers`: the workers at the start, and the maximum number of workers (None: no more
      than at the start).
    - `max_requests`: limit of open requests, running and waiting. `max_waiting_tokens`: limit of the prompt
      tokens of waiting requests; one request may always wait.
    - `stuck_after`: seconds without progress after which a worker counts as stuck.
    - `max_attempts`: a request is given up after it ended its worker this often while it ran alone, or after
      this many failed KV transfers.
    - `continue_tokens`: a decode worker computes the rest of a prompt itself if at most this many tokens are
      missing in its cache, and it has more cached than the prefill worker.
    - `slo_admission`: whether decode workers may refuse a request; then its first token waits for their
      decision.
    - `adapters`: LoRA adapters that are loaded from the start.
    """

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
        """The maximum number of workers."""
        return max(len(self.topology.names), self.max_workers or 0)
