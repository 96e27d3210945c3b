"""The actor that Ray places on a machine: it runs an agent, which joins the head."""

import socket
from dataclasses import dataclass

from streamserve.extras.cluster.agent import Agent, AgentConfig
from streamserve.extras.cluster.membership import JoinError
from streamserve.protocol.cluster import Machine
from streamserve.protocol.config import LogLevel
from streamserve.protocol.curve import KeyPair, parse_endpoint
from streamserve.system.logs import configure_logging
from streamserve.system.machine import identity, own_address


@dataclass(frozen=True)
class RayAgentConfig:
    """The configuration of an agent that is passed through Ray: the head's `address` and public key, its own
    key pair, the `worker` for which it is made, its processors and GPUs, and its log level."""

    address: str
    head_key: bytes
    public: bytes
    secret: bytes
    worker: str
    cpus: int
    gpus: int
    log_level: LogLevel

    def __repr__(self) -> str:
        return f"RayAgentConfig({self.worker!r}, {self.address!r})"  # without the secret key


class RayAgent:
    """An agent with one slot, run as Ray's actor."""

    def __init__(self, config: RayAgentConfig) -> None:
        self._config = config
        self._agent: Agent | None = None

    async def run(self) -> str:
        """Serve the head until `stop`. The worker gets the share of the machine's memory that equals its
        share of the processors; its GPUs are not shared. Return why the head refuses this machine for good,
        or ""."""
        config = self._config
        configure_logging(config.log_level, "text")
        head = parse_endpoint(config.address)
        machine = Machine(machine_name(config.worker), identity(), own_address(head))
        own = KeyPair(config.public, config.secret)
        workers = 1 if config.gpus else max(1, int(machine_cpus() / config.cpus))
        self._agent = Agent(
            AgentConfig(head, config.head_key, own, machine, threads=config.cpus, host_workers=workers)
        )
        try:
            await self._agent.run()
        except JoinError as error:
            return str(error)
        return ""

    async def stop(self) -> None:
        """End the worker, then the agent."""
        if self._agent:
            self._agent.stop()


def machine_cpus() -> float:
    """Return the number of processors that Ray has on the machine of this actor."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return float(sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["NodeID"] == here))


def machine_name(worker: str) -> str:
    """Return a name for the agent on this machine that is made for `worker`."""
    host = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname()) or "machine"
    return f"{host[:40]}.{worker}"
