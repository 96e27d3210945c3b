"""Addresses of draft services, and the CURVE keys by which they and their targets authenticate each other.

A key is 32 bytes, written as 64 hexadecimal digits. A key file holds a pair, and is private to its owner:

    public = 3f…
    secret = 9c…

A file of allowed clients has one public key per line, followed by the client's name.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamserve.protocol.files import read_regular_file

_KEY = re.compile(r"[0-9a-f]{64}")
_ENDPOINT = re.compile(r"tcp://(?:([0-9a-f]{64})@)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.*-]+):([0-9]{1,5})")


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, as bytes."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public.hex()})"


@dataclass(frozen=True)
class Endpoint:
    """An address `tcp://[SERVERKEY@]HOST:PORT`."""

    host: str
    port: int
    server_key: bytes | None = None

    @property
    def address(self) -> str:
        """The address in ZeroMQ's syntax."""
        return f"tcp://{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        name = self.host.strip("[]")
        if name == "localhost":
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def parse_endpoint(text: str) -> Endpoint:
    """Parse an address. Raises ValueError if it is invalid."""
    match = _ENDPOINT.fullmatch(text)
    if not match or int(match[3]) > 65535:
        raise ValueError(f"{text!r} is not tcp://HOST:PORT or tcp://SERVERKEY@HOST:PORT")
    return Endpoint(match[2], int(match[3]), bytes.fromhex(match[1]) if match[1] else None)


def parse_endpoints(text: str) -> list[Endpoint]:
    """Parse a comma-separated list of addresses. Raises ValueError if one is invalid, or if the list is
    empty."""
    return [parse_endpoint(part.strip()) for part in text.split(",")]


def read_key_pair(path: str | Path) -> KeyPair:
    """Read a key file. Raises ValueError, which quotes no key, if the file is invalid."""
    values = {}
    for line in _lines(path):
        name, _, value = line.partition("=")
        values[name.strip()] = value.strip()
    if not all(_KEY.fullmatch(values.get(name, "")) for name in ("public", "secret")):
        raise ValueError(f"{path} is not a key file: create one with `streamserve keys new {path}`")
    return KeyPair(bytes.fromhex(values["public"]), bytes.fromhex(values["secret"]))


def write_key_pair(path: str | Path, pair: KeyPair) -> None:
    """Write a new key file that only its owner can read. Raises OSError if the file exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"public = {pair.public.hex()}\nsecret = {pair.secret.hex()}\n")


def read_clients(path: str | Path) -> Mapping[bytes, str]:
    """Return the clients' names by public key. Raises ValueError for a line without a key, and for a file
    without keys."""
    clients = {}
    for number, line in enumerate(_lines(path), start=1):
        key, _, name = line.partition(" ")
        if not _KEY.fullmatch(key):
            raise ValueError(f"{path}: entry {number} does not begin with a public key")
        clients[bytes.fromhex(key)] = name.strip() or key[:8]
    if not clients:
        raise ValueError(f"{path} contains no public key: add one per line, followed by a name")
    return clients


def _lines(path: str | Path) -> list[str]:
    try:
        lines = read_regular_file(path).decode("utf-8", "replace").splitlines()  # workers read it too
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]
