"""What identifies a machine, for processes that want to share memory, and where others reach it."""

import os
import socket
from pathlib import Path

from streamserve.protocol.curve import Endpoint


def identity() -> str:
    """Return what processes have in common that can open each other's memory: boot, processes, user."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"


def own_address(head: Endpoint) -> str:
    """Return this machine's address on the way to another one. Raises OSError if there is no way."""
    host = head.host.strip("[]")
    family, kind, protocol, _, address = socket.getaddrinfo(host, head.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
