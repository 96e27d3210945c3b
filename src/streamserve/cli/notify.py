"""Tells systemd the state of the server (`Type=notify`): one datagram to the socket that systemd names."""

import logging
import os
import socket

_log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"
READY, STOPPING = "READY=1", "STOPPING=1"


def notify(state: str) -> None:
    """Send `state` to the service manager, if there is one. A failure is logged, and does not end the server.

    The protocol is described in sd_notify(3). An address that begins with @ is abstract.
    """
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    if address[0] not in "/@":
        _log.warning("%s = %r is not supported: only paths and abstract addresses are", VARIABLE, address)
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
    except OSError as error:
        _log.warning("the service manager at %s could not be notified of %s: %s", address, state, error)
