"""The ports of an engine: what it may be connected to, apart from its executor and drafter."""

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
    """What an engine is connected to.

    * `name`: the worker's, unique among those that exchange KV.
    * `transport` lets the engine send the KV of prompts to other workers.
    * `reports_prefixes`: a router wants to know the changes of the prefix index, as that of pairs does.
    * `cache`, the address of the engine's KV pool, lets other workers send theirs to it.
    * `gate`, where others write to the pool over the network, is told which blocks they may write.
    * `landing`, where others write to memory that steps do not read, is told what has landed.
    * `draft_wait`: seconds to wait for the drafter; a later answer is not used in this step.
    * `floor`, where the machine has been measured, returns the least seconds that a plan could take; reports
      hold the sum.
    * `swap_cost`: the cost of copying KV blocks to the host pool and back.
    * `adapters`: the LoRA adapters that its executor has.
    * `observer` receives the lifecycle events of requests, `journal` what is about to be done.
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
"""The ports of an engine that is connected to nothing."""
