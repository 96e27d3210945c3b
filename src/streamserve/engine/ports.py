"""The ports of an engine: its optional connections, apart from its executor and drafter."""

from collections.abc import Callable
from dataclasses import dataclass

from streamserve.contracts.cost import DEFAULT_SWAP_COST, SwapCost
from streamserve.contracts.plan import StepPlan
from streamserve.contracts.transport import Gate, Landing, Transport
from streamserve.engine.adapters import Adapters
from streamserve.engine.observer import Journal, Observer
from streamserve.protocol.transfers import CacheAddress


@dataclass(frozen=True)
class EnginePorts:
    """The optional connections of an engine.

    * `name`: the worker's name, unique among the workers that exchange KV.
    * `transport`: sends the KV of prompts to other workers.
    * `reports_prefixes`: whether to record the changes of the prefix index for a router.
    * `cache`: the address of the engine's KV pool; with it, other workers can send KV to this one.
    * `gate`: where other workers write to the pool over the network, it restricts the blocks that they may
      write.
    * `landing`: where other workers write to memory that steps do not read, it copies landed blocks to the
      pool.
    * `draft_wait`: seconds to wait for the drafter; a later answer is not used in this step.
    * `floor`: returns the least seconds that a plan could take, if the machine has been measured; reports
      contain the sum.
    * `swap_cost`: the cost of copying KV blocks to the host pool and back.
    * `adapters`: the executor's LoRA adapters.
    * `observer`: receives the lifecycle events of requests. `journal`: records what the engine is about to
      do.
    """

    name: str = ""
    transport: Transport | None = None
    cache: CacheAddress | None = None
    reports_prefixes: bool = False
    gate: Gate | None = None
    landing: Landing | None = None
    draft_wait: float = 1.0
    floor: Callable[[StepPlan], float] | None = None
    swap_cost: SwapCost = DEFAULT_SWAP_COST
    observer: Observer | None = None
    journal: Journal | None = None
    adapters: Adapters | None = None


NO_PORTS = EnginePorts()
"""The ports of an engine without optional connections."""
