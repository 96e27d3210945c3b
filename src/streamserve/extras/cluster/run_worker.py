"""Runs the agent of `streamserve worker` until a signal."""

import asyncio

from msgspec.structs import replace

from streamserve import __version__
from streamserve.cli.announce import announce
from streamserve.extras.cluster.agent import Agent, AgentConfig
from streamserve.extras.cluster.membership import JoinError
from streamserve.protocol.config import LogLevel
from streamserve.protocol.curve import Endpoint
from streamserve.protocol.errors import StartError
from streamserve.settings.cluster import JoinSettings
from streamserve.settings.options import SettingsError
from streamserve.system.logs import configure_logging
from streamserve.system.machine import own_address
from streamserve.system.stop_signals import stop_signals


def run(settings: JoinSettings, log_level: LogLevel) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. Raises StartError if the server refuses this machine for good,
    SettingsError if there is no route to the server."""
    configure_logging(log_level, "text")
    asyncio.run(_serve(settings))


async def _serve(settings: JoinSettings) -> None:
    machine = settings.machine
    machine = replace(machine, address=machine.address or _own_address(settings.head))
    config = AgentConfig(
        settings.head, settings.head_key, settings.own, machine, settings.model, keep=settings.keep
    )
    agent = Agent(config)
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, agent.stop)
    announce(f"streamserve {__version__}: {machine.name} joins {settings.head.address} …")
    try:
        await agent.run()
    except JoinError as error:
        raise StartError(str(error)) from None


def _own_address(head: Endpoint) -> str:
    """Return this machine's address on the route to the head. Raises SettingsError if there is no route."""
    try:
        return own_address(head)
    except OSError as error:
        host = head.host.strip("[]")
        raise SettingsError(f"{host} has no route from here ({error.strerror}): check --join") from error
