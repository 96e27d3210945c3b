"""A wire between two Ethernet segments that delays frames, holds them, or loses the frames of one direction.
It replaces netem where the kernel lacks it.

    segment A ── TAP ══ this process ══ TAP ── segment B

    python -m tests.extras.cluster.wire A B     the names of the two devices, which it creates
    ◀ delay SECONDS | stall | mute | flow     mute: frames from B to A are lost
    ◀ count     ▶ {"A": …, "B": …, "late": …, "held": …, "lost": …}     frames by device and by fault
"""

import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time
from collections import Counter
from contextlib import suppress

SET_INTERFACE = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MAX_FRAME = 65536
MAX_HELD = 50_000
"""Maximum number of frames that are held; further frames are lost."""


class Wire:
    """The frames in flight, and the fault. Times are in seconds."""

    def __init__(self, ends: dict[int, str]) -> None:
        self._ends = ends
        self._other = dict(zip(ends, reversed(ends), strict=True))
        self._counts: Counter[str] = Counter()
        self._delay = 0.0
        self._fault = "flow"
        self._held: list[tuple[float, int, int, bytes]] = []

    def command(self, words: list[str]) -> None:
        """Execute a command from standard input."""
        match words:
            case ["count"]:
                print(json.dumps(self._counts), flush=True)
            case ["delay", seconds]:
                self._fault, self._delay = "flow", float(seconds)
            case [fault]:
                self._fault, self._delay = fault, 0.0

    def take(self, end: int, frame: bytes, now: float) -> None:
        """Process a frame that was read from a device."""
        self._counts[self._ends[end]] += 1
        lost = (self._fault == "mute" and self._ends[end] == "B") or len(self._held) >= MAX_HELD
        self._counts["lost"] += lost
        self._counts["held"] += self._fault == "stall"
        self._counts["late"] += self._delay > 0
        if not lost:
            number = self._counts["A"] + self._counts["B"]
            heapq.heappush(self._held, (now + self._delay, number, self._other[end], frame))

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Return the frames to pass on, with their devices."""
        frames = []
        while self._fault != "stall" and self._held and self._held[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._held)
            frames.append((end, frame))
        return frames

    def wait(self, now: float) -> float | None:
        """Return the seconds until a frame is due; None if only a frame or a command changes anything."""
        if self._fault == "stall" or not self._held:
            return None
        return max(0.0, self._held[0][0] - now)


def carry(devices: list[str]) -> None:
    """Run the wire until standard input closes."""
    ends = dict(zip(map(_create, devices), "AB", strict=True))
    wire = Wire(ends)
    print("up", flush=True)
    while True:
        ready, _, _ = select.select([0, *ends], [], [], wire.wait(time.monotonic()))
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return
            for line in data.decode().splitlines():
                wire.command(line.split())
        for end in set(ready) & set(ends):
            wire.take(end, os.read(end, MAX_FRAME), time.monotonic())
        for end, frame in wire.due(time.monotonic()):
            with suppress(OSError):  # The device is down.
                os.write(end, frame)


def _create(device: str) -> int:
    """Create a TAP device, and return the file descriptor from which its frames are read."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, SET_INTERFACE, struct.pack("16sH22x", device.encode(), TAP_WITHOUT_HEADER))
    return end


if __name__ == "__main__":
    carry(sys.argv[1:])
