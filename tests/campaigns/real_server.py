"""A real server process, with checks that it runs, replies to a probe as before, and logs no errors."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.campaigns.outcome import DEATH, HANG, TRACEBACK, WRONG_TEXT, TrialFailure
from tests.campaigns.process_output import first_fault

START_SECONDS = 60.0
PROBE_SECONDS = 60.0
PROBE = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
WORKER_DEATH = re.compile(r"worker \S+: its process ended.*|.*: killing it.*")


class RealServer:
    """A server process. Start it with `start`, end it with `end`."""

    def __init__(
        self,
        model: str,
        *flags: str,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        """`prefix` is put before the server's command (`prlimit …`); `before` runs in the new process before
        the command."""
        self._command = [*prefix, sys.executable, "-m", "streamserve", "serve", model, "--port", "0", *flags]
        self._environment = {**os.environ, "STREAMSERVE_PROFILE": "false", **(environment or {})}
        self._before = before
        self._expected: list[str] = []
        self._seen = 0

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start the server and wait until it is ready. Raises TrialFailure if it ends or is not ready in
        time."""
        handle, path = tempfile.mkstemp(suffix=".log")
        self._log = Path(path)
        self._seen = 0
        self.process = subprocess.Popen(
            self._command,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env=self._environment,
            preexec_fn=self._before,
        )
        os.close(handle)
        deadline = time.monotonic() + seconds
        while not (match := re.search(r"ready .* at (http://\S+:(\d+))", self.log())):
            if self.process.poll() is not None:
                raise TrialFailure(
                    DEATH, f"the server ended with {self.process.returncode}: {self.log()[-800:]}"
                )
            if time.monotonic() > deadline:
                self.end()
                raise TrialFailure(HANG, f"not ready after {seconds:g} s: {self.log()[-800:]}")
            time.sleep(0.05)
        self.url, self.port = match[1], int(match[2])
        self.worker_deaths = 0

    def end(self) -> int:
        """End the server and return its exit status; killed if it does not end in time."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            status = self.process.wait(40)
        except subprocess.TimeoutExpired:
            for process in self.processes():
                process.kill()
            status = self.process.wait(10)
        self._log.unlink(missing_ok=True)
        return status

    def log(self) -> str:
        """Return everything that the server has printed."""
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and its workers'."""
        try:
            server = psutil.Process(self.process.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def probe(self) -> str:
        """Return the text of a valid request. Raises TrialFailure if it differs from the first probe's
        text."""
        end = time.monotonic() + PROBE_SECONDS
        while True:
            try:
                reply = httpx.post(f"{self.url}/v1/completions", json=PROBE, timeout=PROBE_SECONDS)
            except httpx.TransportError as error:
                raise TrialFailure(HANG, f"the probe: {error!r}") from error
            if reply.status_code == 200:
                break
            if reply.status_code not in (429, 503) or time.monotonic() > end:
                raise TrialFailure(HANG, f"the probe: {reply.status_code} {reply.text}")
            time.sleep(0.1)
        text: str = reply.json()["choices"][0]["text"]
        self._expected = self._expected or [text]
        if text != self._expected[0]:
            raise TrialFailure(WRONG_TEXT, f"the probe: {text!r} is not {self._expected[0]!r}")
        return text

    def check(self) -> None:
        """Raise TrialFailure if the server or a worker died, or if a traceback was logged, since the last
        check."""
        if self.process.poll() is not None:
            raise TrialFailure(DEATH, f"the server ended with {self.process.returncode}: {self.log()[-800:]}")
        text = self.log()
        new, self._seen = text[self._seen :], len(text)
        death = WORKER_DEATH.search(new)
        if death:
            raise TrialFailure(DEATH, f"{death[0]}\n{first_fault(new)}")
        fault = first_fault(new)
        if fault:
            raise TrialFailure(TRACEBACK, fault)

    def peak_megabytes(self) -> float:
        """Return the peak resident size of the API process in megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        match = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(match[1]) / 1024 if match else 0.0

    def worst(self, health_seconds: float) -> dict[str, float]:
        """Return the measurements of a trial: the longest wait for /health, the API process's peak memory."""
        return {
            "health_ms": round(health_seconds * 1000, 1),
            "api_peak_mb": round(self.peak_megabytes(), 1),
        }

    def connect(self, seconds: float = 10.0) -> socket.socket:
        """Return a plain socket connected to the server."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=seconds)


@contextmanager
def health_latency(server: RealServer) -> Iterator[Callable[[], float]]:
    """Request /health repeatedly. The context manager returns a function for the longest latency in seconds
    since that function was last called."""
    stop, longest = threading.Event(), [0.0]

    def poll() -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.wait(0.03):
                started = time.monotonic()
                try:
                    client.get(f"{server.url}/health")
                except httpx.TransportError:
                    continue
                longest[0] = max(longest[0], time.monotonic() - started)

    def take() -> float:
        seconds_taken, longest[0] = longest[0], 0.0
        return seconds_taken

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield take
    finally:
        stop.set()
        thread.join(5)


class ServerCampaign:
    """A campaign whose trials share a server; it is restarted after a failed trial."""

    def __init__(self, server: RealServer) -> None:
        self.server = server
        self._running = False

    def ready(self) -> None:
        """Start the server if it is not running, and check its reply to the probe."""
        if not self._running:
            self.server.start()
            self._running = True
        self.server.probe()

    def failed(self) -> None:
        """End the server, so that the next trial starts another."""
        if self._running:
            self._running = False
            self.server.end()

    close = failed
