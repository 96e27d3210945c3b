"""A machine's identity, for processes that want to share memory, and its address for other machines."""

import os
import socket
from pathlib import Path

from streamserve.protocol.curve import Endpoint


def identity() -> str:
    """Return a value that is equal for processes which can open each other's memory: boot, process namespace,
    user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def own_address(head: Endpoint) -> str:
    """Return the address of this machine on its route to the head. Raises OSError if there is no route."""
    host = head.host.strip("[]")
    family, kind, protocol, _, address = socket.getaddrinfo(host, head.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: sends nothing
        return str(probe.getsockname()[0])
