"""Simulate hosts on one machine: network namespaces, and a wire between them with a chosen delay.

Every host has a TUN device. A process carries each IP packet from one's device to another's, `delay` seconds
late, handshakes and acknowledgements too, as a longer wire would. (Where the kernel can delay packets itself,
netem does the same; not every kernel can.) Needs root. Nothing leaves this machine.

    host 0 ── tun ══╗  read ▶ hold for `delay` ▶ write  ╔══ tun ── host 1
    host 2 ── tun ══╩═══════════════════════════════════╝
"""

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

SET_INTERFACE = 0x400454CA
TUN_WITHOUT_HEADER = 0x0001 | 0x1000
MAX_BYTES = 65536


def address(host: int) -> str:
    """Return a host's address."""
    return f"10.77.0.{host + 1}"


def enter(host: int) -> list[str]:
    """Return the beginning of a command that runs on a host."""
    return ["ip", "netns", "exec", _name(host)]


@contextlib.contextmanager
def hosts(count: int, delay: float) -> Iterator[None]:
    """Create `count` hosts, with a delay of `delay` seconds between each two."""
    wire = None
    try:
        for host in range(count):
            _ip("netns", "add", _name(host))
            _ip("-n", _name(host), "link", "set", "lo", "up")
        wire = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.papers.wire", str(count), str(delay)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert wire.stdin is not None
        assert wire.stdout is not None
        assert wire.stdout.readline() == "up\n", "there is no wire"
        yield
    finally:
        if wire is not None:
            wire.communicate()
        for host in range(count):
            subprocess.run(["ip", "netns", "del", _name(host)], check=False, capture_output=True)


def round_trip(one: int, other: int, count: int = 20) -> float:
    """Return the median seconds that a byte takes to another host and back over TCP."""
    listen = (
        "import socket; s = socket.create_server(('', 5000)); print(flush=True); c, _ = s.accept()\n"
        "while data := c.recv(1): c.sendall(data)"
    )
    call = (
        f"import socket, time\ns = socket.create_connection(('{address(other)}', 5000)); found = []\n"
        f"for _ in range({count}):\n"
        "  t = time.perf_counter(); s.sendall(b'x'); s.recv(1); found.append(time.perf_counter() - t)\n"
        f"print(sorted(found)[{count // 2}])"
    )
    with subprocess.Popen([*enter(other), sys.executable, "-c", listen], stdout=subprocess.PIPE) as echo:
        assert echo.stdout is not None
        echo.stdout.readline()
        command = [*enter(one), sys.executable, "-c", call]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def fetch(host: int, url: str) -> str:
    """Return the content at `url` as read from a host."""
    code = f"import urllib.request; print(urllib.request.urlopen({url!r}).read().decode(), end='')"
    command = [*enter(host), sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def carry(count: int, delay: float) -> None:
    """Run the wire until standard input closes."""
    ends = [_end(host) for host in range(count)]
    over = sys.stdin.fileno()
    print("up", flush=True)
    held: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([over, *ends], [], [], wait)
        if over in ready:
            return
        now = time.monotonic()
        for end in ready:
            packet = os.read(end, MAX_BYTES)
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the destination address
            if 0 <= to < count:
                number += 1
                heapq.heappush(held, (now + delay, number, ends[to], packet))
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, _, end, packet = heapq.heappop(held)
            os.write(end, packet)


def _end(host: int) -> int:
    """Create a host's device and move it to the host; packets sent to it can be read from the file
    descriptor."""
    device = f"sswire{host}"
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, SET_INTERFACE, struct.pack("16sH14x", device.encode(), TUN_WITHOUT_HEADER))
    _ip("link", "set", device, "netns", _name(host))
    _ip("-n", _name(host), "addr", "add", f"{address(host)}/24", "dev", device)
    _ip("-n", _name(host), "link", "set", device, "up")
    return end


def _name(host: int) -> str:
    return f"ss-host-{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    carry(int(sys.argv[1]), float(sys.argv[2]))
