"""The first minutes of a machine without a compiler: from an empty environment to the first token.

Each step is timed: the environment, torch, the wheel of `make wheel` with its dependencies, and a server from
its start to the first token of the packaged model. Downloads are timed apart from the installation, since
their speed is the registry's; they use no cache of pip's. The caches of the server are empty.

    make wheel && python -m benchmarks.packaged.first_hour
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.report import PACKAGED_PAIR, table, write

TORCH = "torch==2.13.0"
COMPILERS = ("c++", "g++", "clang++", "cc", "gcc", "clang")
SERVER_SECONDS = 120
QUESTION = {"model": "embedded", "stream": True, "messages": [{"role": "user", "content": "What is 12 + 7?"}]}

Step = dict[str, Any]


def megabytes(folder: Path) -> float:
    """Return the size of the folder's files, in units of 10**6 bytes."""
    sizes = (path.lstat().st_size for path in folder.rglob("*") if path.is_file())
    return round(sum(sizes) / 1e6, 1)


class Machine:
    """An empty folder with a new environment, and environment variables with which no compiler is found."""

    def __init__(self, folder: Path) -> None:
        self.home, self.downloads = folder / "venv", folder / "downloads"
        self.downloads.mkdir()
        removed = ("CXX", "PYTHONPATH", "VIRTUAL_ENV")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in removed and not name.startswith("STREAMSERVE_")
        }
        paths = {"PATH": str(self.home / "bin"), "XDG_CACHE_HOME": str(folder / "cache")}
        self.environment = inherited | paths

    def run(self, *command: str | Path) -> float:
        """Run a command; return its seconds. Raises CalledProcessError."""
        began = time.perf_counter()
        subprocess.run(command, env=self.environment, check=True, stdout=sys.stderr)
        return round(time.perf_counter() - began, 2)

    def install(self, name: str, package: str | Path) -> Step:
        """Download a package and its dependencies, then install them; return seconds and sizes. The downloads
        match the installed build of torch, which is not downloaded again."""
        pip = (self.home / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check")
        before, downloaded = megabytes(self.home), megabytes(self.downloads)
        arguments = ("--no-cache-dir", "--dest", self.downloads, "--find-links", self.downloads)
        download = self.run(*pip, "download", *arguments, TORCH, package)
        found = ("--no-index", "--no-cache-dir", "--find-links", self.downloads)
        installation = self.run(*pip, "install", *found, package)
        return {
            "step": name,
            "download_seconds": download,
            "seconds": installation,
            "download_mb": round(megabytes(self.downloads) - downloaded, 1),
            "disk_mb": round(megabytes(self.home) - before, 1),
        }


def serve(machine: Machine) -> Step:
    """Start a server and send requests until it answers; return the seconds to the first token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    began = time.perf_counter()
    command = (machine.home / "bin" / "streamserve", "serve", "--port", port)
    server = subprocess.Popen(command, env=machine.environment, stdout=sys.stderr)
    try:
        while not (text := first_token(f"http://127.0.0.1:{port}")):
            if server.poll() is not None or time.perf_counter() - began > SERVER_SECONDS:
                raise SystemExit("the server did not answer")
            time.sleep(0.02)
        seconds = time.perf_counter() - began
    finally:
        server.terminate()
        server.wait(60)
    return {"step": "streamserve serve, to the first token", "seconds": round(seconds, 2), "text": text}


def first_token(url: str) -> str:
    """Return the first text that the server streams; an empty string while the server does not serve yet."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(QUESTION).encode(), headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=SERVER_SECONDS) as events:
            for line in events:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    if text := choice["delta"].get("content"):
                        return str(text)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
    except urllib.error.URLError:
        pass
    return ""


def measure(wheel: Path, folder: Path) -> list[Step]:
    """Return the measured steps."""
    machine = Machine(folder)
    venv = {"step": "python3 -m venv", "seconds": machine.run(sys.executable, "-m", "venv", machine.home)}
    found = [name for name in COMPILERS if shutil.which(name, path=machine.environment["PATH"])]
    if found:
        raise SystemExit(f"there is a compiler: {', '.join(found)}")
    venv["disk_mb"] = megabytes(machine.home)
    torch = machine.install(f"pip install {TORCH}", TORCH)
    package = machine.install("pip install dist/streamserve-*.whl", wheel)
    return [venv, torch, package, serve(machine)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="the wheel to install (default: the wheel in dist/)")
    parser.add_argument(
        "--registry", default="pip's default", help="name of the package index, for the report"
    )
    arguments = parser.parse_args()
    wheel = arguments.wheel or next(Path("dist").glob("streamserve-*.whl"), None)
    if wheel is None:
        raise SystemExit("there is no wheel: make wheel")
    with tempfile.TemporaryDirectory(prefix="streamserve-first-hour-") as folder:
        steps = measure(wheel.resolve(), Path(folder))
    rows = [[step["step"], f"{step['seconds']:.1f} s"] for step in steps]
    table("From an empty environment to the first token", ["step", "time"], rows)
    settings = {"torch": TORCH, "wheel": wheel.name, "registry": arguments.registry, "caches": "empty"}
    print(write("first_hour", settings, {"steps": steps}, PACKAGED_PAIR))


if __name__ == "__main__":
    main()
