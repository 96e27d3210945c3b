"""A real `streamserve serve` process for tests."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from tests.command_server import Command


@dataclass
class Served:
    """A running server: its process, its URL, and its output until it was ready."""

    process: Command
    url: str
    banner: str
    seconds: float

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(20)


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """Start a server on a free port. At the end of the block it is stopped, and must exit."""
    started = time.monotonic()
    process = Command(["serve", *arguments, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        banner = ""
        while "curl" not in banner:
            line = process.stdout.readline()
            assert line, f"the server ended: {banner}"
            banner += line
        url = re.search(r"ready .* at (https?://\S+)", banner)
        assert url, banner
        Thread(target=process.stdout.read, daemon=True).start()
        yield Served(process, url[1], banner, time.monotonic() - started)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(20)
        process.stdout.close()
