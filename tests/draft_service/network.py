"""Runs a real draft service, and a faulty network between the service and its targets."""

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from tests.command_server import Command


@dataclass
class Drafting:
    """A running `streamserve draft`: its address, and all its output."""

    process: Command
    address: str
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """Kill the process, as a failure of its machine would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def metric(self, name: str) -> float:
        """Return the value of a metric of a service that was started with `--metrics`."""
        (line,) = (line for line in self.lines if "/metrics" in line)
        with urllib.request.urlopen(line.split()[-1]) as reply:
            text = reply.read().decode()
        match = re.search(rf"^streamserve_draft:{name} (\S+)$", text, re.MULTILINE)
        assert match, f"there is no {name}"
        return float(match[1])

    def printed(self, text: str) -> bool:
        return any(text in line for line in list(self.lines))


@contextlib.contextmanager
def drafting(model: str, *flags: str, port: int = 0) -> Iterator[Drafting]:
    """Run a service on loopback; at the end of the block, stop it and check that it exits."""
    with tempfile.TemporaryDirectory() as own:  # a killed service does not remove its files
        listen = [] if "--listen" in flags else ["--listen", f"tcp://127.0.0.1:{port}"]
        process = Command(
            ["draft", model, *listen, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": own},
        )
        service = Drafting(process, "")
        reader = threading.Thread(target=lambda: service.lines.extend(process.stdout), daemon=True)
        try:
            while not service.address:
                line = process.stdout.readline()
                assert line, f"the service ended: {service.lines}"
                service.lines.append(line)
                match = re.search(r"ready .* at (tcp://\S+)", line)
                service.address = match[1] if match else ""
            reader.start()
            yield service
        finally:
            process.terminate()
            process.wait(20)
            if reader.is_alive():
                reader.join(5)
            process.stdout.close()


class Network(threading.Thread):
    """A proxy between targets and the service at `address`: messages are lost, duplicated or reordered, and
    sometimes all connections break. `calm` turns the faults off."""

    def __init__(self, address: str, seed: int) -> None:
        super().__init__()
        self.calm = False
        self.broken = self.lost = self.doubled = self.overtaken = 0
        self._rng = random.Random(seed)
        self._service = address
        self._over = threading.Event()
        self._breaking = threading.Event()
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket] = {}
        self._held: list[tuple[float, zmq.Socket, list[bytes]]] = []

    def break_connections(self) -> None:
        self._breaking.set()

    def __enter__(self) -> "Network":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()
        for socket in [self._front, *self._backs.values()]:
            socket.close()
        self._context.term()

    def run(self) -> None:
        while not self._over.is_set():
            if self._breaking.is_set():
                self._breaking.clear()
                self._reconnect()
            for peer, return_seconds in list(self._backs.items()):
                while return_seconds.poll(0):
                    self._pass(self._front, [peer, return_seconds.recv()])
            while self._front.poll(1):
                peer, data = self._front.recv_multipart()
                self._pass(self._back(peer), [data])
            now = time.monotonic()
            for due, socket, parts in self._held:
                if due <= now:
                    socket.send_multipart(parts)
            self._held = [stored_bytes for stored_bytes in self._held if stored_bytes[0] > now]

    def _pass(self, socket: zmq.Socket, parts: list[bytes]) -> None:
        chance = 1.0 if self.calm else self._rng.random()
        if chance < 0.02:
            self.lost += 1
            return
        if chance < 0.06:
            self.doubled += 1
            socket.send_multipart(parts)
        if chance < 0.15:
            self.overtaken += 1
            self._held.append((time.monotonic() + self._rng.random() * 0.05, socket, parts))
            return
        socket.send_multipart(parts)

    def _back(self, peer: bytes) -> zmq.Socket:
        if peer not in self._backs:
            self._backs[peer] = return_seconds = self._context.socket(zmq.DEALER)
            return_seconds.setsockopt(zmq.LINGER, 0)
            return_seconds.connect(self._service)
        return self._backs[peer]

    def _reconnect(self) -> None:
        """Give all targets new connections. Messages in flight are lost."""
        self.broken += 1
        self._held.clear()
        for return_seconds in self._backs.values():
            return_seconds.close()
        self._backs.clear()
