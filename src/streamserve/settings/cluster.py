"""Settings of workers on other machines: for the server that machines join, and for `streamserve worker`."""

import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from streamserve.protocol.cluster import Machine
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.curve import Endpoint, KeyPair, parse_endpoint, read_clients, read_key_pair
from streamserve.protocol.draft_kind import DraftKind, draft_kind
from streamserve.settings.checkpoints import locate
from streamserve.settings.options import SECRETS, SettingsError
from streamserve.settings.server_config import ServerConfig
from streamserve.system.machine import identity

NEW_KEY = "create one with `streamserve keys new FILE`"


@dataclass(frozen=True)
class JoinSettings:
    """How `streamserve worker` joins a head. The fields are described in AgentConfig
    (extras/cluster/agent.py), which is made from this: the core cannot import it."""

    head: Endpoint
    head_key: bytes
    own: KeyPair
    machine: Machine
    model: str | None
    keep: float = 0.0


def check_launcher(server: ServerConfig, model: ModelConfig) -> None:
    """Check the settings of a server whose workers run on other machines. Raises SettingsError if they are
    invalid, contradict each other, or need a package that is not installed."""
    if server.launcher == "local":
        return
    try:
        endpoint = parse_endpoint(server.listen)
        if server.join_key:
            read_key_pair(server.join_key)
        if server.join_clients:
            read_clients(server.join_clients)
    except ValueError as error:
        raise SettingsError(f"launcher = {server.launcher!r}: {error}") from None
    if endpoint.server_key:
        raise SettingsError(
            "listen: the address must not contain a key: give this server's own key as join_key"
        )
    if server.join_clients and not server.join_key:
        raise SettingsError(
            f"join_clients: has no effect without join_key, the server's own key: {NEW_KEY}, or leave "
            "join_clients out"
        )
    if server.launcher == "ray":
        ray_resources(server.ray_resources)
        if "://" in server.ray_address:
            raise SettingsError(
                f"ray_address = {server.ray_address!r}: must be auto or HOST:PORT of Ray's head: the server "
                "runs on a machine of the cluster"
            )
        if find_spec("ray") is None:
            raise SettingsError("launcher = 'ray': Ray is not installed: pip install 'streamserve[ray]'")
    elif not server.join_key:
        raise SettingsError(f"launcher = {server.launcher!r}: join_key is required: {NEW_KEY}")
    if server.kv_transport == "nixl" and not server.kv_trusted_network:
        raise SettingsError(
            "kv_transport = 'nixl': NIXL has no keys: every program that reaches its ports can write to "
            "the memory of workers: leave kv_transport out, or give kv_trusted_network if only the "
            "workers can reach their network"
        )
    if draft_kind(model.draft) is DraftKind.SERVICE and model.draft_key:
        raise SettingsError("draft_key: a key file is not sent to machines that join: use another drafter")


def check_visible_keys(server: ServerConfig, flags: Collection[str]) -> None:
    """Raise SettingsError if a key is among the `flags` and Ray shows the command line."""
    for name in flags:
        if name in SECRETS and server.launcher == "ray":
            raise SettingsError(
                f"{name}: Ray shows the command line of a server to everything that reaches Ray: give "
                f"{name}_file, or the variable STREAMSERVE_{name.upper()}"
            )


def allowed_keys(server: ServerConfig) -> dict[str, str]:
    """Return the names of the machines that may join, by their public keys in hexadecimal."""
    if not server.join_key:
        return {}
    if server.join_clients:
        return {key.hex(): name for key, name in read_clients(server.join_clients).items()}
    return {read_key_pair(server.join_key).public.hex(): "join_key"}


def ray_resources(given: Sequence[str]) -> dict[str, float]:
    """Return the amounts of custom resources by name, from NAME=AMOUNT. Raises SettingsError for other
    forms."""
    amounts: dict[str, float] = {}
    for text in given:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            amounts[name] = 0.0
        if not name or name in ("CPU", "GPU", "memory") or not 0 < amounts[name] < 1e6:
            raise SettingsError(
                f"ray_resources = {text!r}: must be NAME=AMOUNT with the name of a custom resource"
            )
    return amounts


def resolve_join(
    join: str,
    key: str | None,
    name: str | None,
    address: str | None,
    slots: int,
    model: str | None,
    keep: float = 0.0,
) -> JoinSettings:
    """Resolve the settings of `streamserve worker`.

    `join` is the head's address, `key` the path of this machine's key file, and `name` the machine's name (by
    default its host name). `address`, `slots`, `model` and `keep` are fields of Machine and AgentConfig.

    Raises SettingsError for invalid settings, CheckpointError if the model is not found.
    """
    try:
        head = parse_endpoint(join)
        if key is None:
            raise ValueError(
                "--key is required: give a copy of the server's --join-key file, or a key of this machine "
                f"that the server lists in --join-clients ({NEW_KEY})"
            )
        own = read_key_pair(key)
        if not head.port:
            raise ValueError(f"{join!r} has no port: give the port that the server listens on")
    except ValueError as error:
        raise SettingsError(str(error)) from None
    try:
        machine = Machine(name or _host_name(), identity(), address or "", slots)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    # With a copy of the server's key file, the server's public key is the public key of this pair.
    return JoinSettings(
        head, head.server_key or own.public, own, machine, str(locate(model)) if model else None, keep
    )


def _host_name() -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname())[:64] or "machine"
