"""Run the README's commands as typed, in order, in a fresh clone with the files as they are now, and check
what each prints or serves.

    python scripts/readme.py [--tests]      needs the ports 8000, 9000 and 7700, and pip's registry

The clone has what the reader is meant to have: checkpoints with the README's names, a file of requests, and
a hub on this machine. The home folder is empty; of this machine's caches, pip's and the compiled kernels of
`make wheel` are used. Servers are asked, then ended with Ctrl-C. What a `$` block shows must be printed, in
order; other numbers may be printed where they are times or counts. `make test` is run with `--tests` only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```python\n(?P<python>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"(?<=\n\n)(?P<block>(?: {4}[^\n]*\n|\n(?= {4}))+)")
SPAN = re.compile(r"`(?P<span>(?:make|pip|source|python|curl|git|streamserve)(?: [^`\n]*)?)`")
NOT_RUN = {
    "make": "a name: `make serve` and `make install` are run",
}
"""Spans of the README that look like commands and are not typed, and why."""
STARTS = re.compile(r"(?:make|pip|source|python|curl|streamserve [a-z]+)\b")
SERVER = re.compile(r"(?:make serve|streamserve (?:serve|draft))\b")
ANSWERS = re.compile(r"--(?:help|print-config)\b")
ASKS = re.compile(r"curl |python examples/folder_stream")
LOOSE = re.compile(r"curl |python examples/folder_stream|streamserve (?:serve|draft)|make serve")
WITHOUT_COMPILER = re.compile(r"pip install torch dist/|streamserve doctor")
READY = re.compile(r"ready +in .* at (\S+)\n")
NEW_FILES = ("ls-files", "-z", "--others", "--exclude-standard")
MINUTES = 20
PORTS = (8000, 9000, 7700)


class Wrong(Exception):
    """A command does not do what the README says."""


@dataclass(frozen=True)
class Command:
    """A command as typed, its standard input, and what the README shows of its output."""

    text: str
    shown: str = ""
    input: str = ""


def commands(readme: str) -> list[Command]:
    """Return the commands of the README in its order: blocks, commands in sentences, Python."""
    found: list[tuple[int, Command]] = []
    for match in FENCE.finditer(readme):
        found.append((match.start(), Command("python -", input=match["python"])))
    for match in SPAN.finditer(readme):
        if match["span"] not in NOT_RUN:
            found.append((match.start(), Command(match["span"])))
    for match in BLOCK.finditer(readme):
        lines = [line[4:] for line in match["block"].splitlines()]
        if lines[0].startswith("$ "):
            entries = re.split(r"^\$ ", "\n".join(lines), flags=re.MULTILINE)[1:]
            found += [(match.start(), _shown(entry)) for entry in entries]
        elif STARTS.match(lines[0]):
            found += [(match.start(), Command(line)) for line in lines if line.strip()]
    return [command for _, command in sorted(found, key=lambda each: each[0])]


def _shown(entry: str) -> Command:
    """Return a command that is followed by its output, in which lines with `> ` are typed."""
    text, _, output = entry.partition("\n")
    typed = re.findall(r"^> (.*)$", output, re.MULTILINE)
    shown = re.sub(r"^> .*\n", "", output, flags=re.MULTILINE)
    return Command(text, shown, "".join(f"{line}\n" for line in typed))


def missing(shown: str, printed: str, loose: bool) -> str:
    """Return the first piece of `shown` that is not printed after the ones before it; empty if all are."""
    at = 0
    for piece in filter(None, (piece.strip() for piece in re.split(r"…|\n", shown))):
        pattern = re.escape(piece)
        match = re.compile(re.sub(r"\d+(?:\\\.\d+)?", r"[\\d.]+", pattern) if loose else pattern).search(
            printed, at
        )
        if match is None:
            return piece
        at = match.end()
    return ""


class Reader:
    """Types commands in the clone: in its environment once that is activated."""

    def __init__(self, clone: Path, hub: str) -> None:
        self.clone, self.activated = clone, False
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
            and not name.startswith(("STREAMSERVE_", "HF_", "XDG_"))
        }
        cache = subprocess.run(
            [sys.executable, "-m", "pip", "cache", "dir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        home = clone.parent / "home"
        home.mkdir()
        self.environment = kept | {
            "HOME": str(home), "PIP_CACHE_DIR": cache, "HF_ENDPOINT": hub, "HF_HOME": str(clone / "hub"),
            "COLUMNS": "200",
        }  # fmt: skip

    def start(self, text: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command in a process group; `/models` is a folder of the clone."""
        typed = text.replace("=/models/", f"={self.clone}/models/")
        activate = "source .venv/bin/activate; " if self.activated else ""
        environment = self.environment
        if WITHOUT_COMPILER.match(text):
            activate = ""
            constraint = {"PIP_CONSTRAINT": str(self.clone / "constraint.txt")}
            environment = environment | constraint | {"PATH": str(self.venv() / "bin")}
        return subprocess.Popen(
            ["/bin/bash", "-c", activate + typed],
            cwd=self.clone,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def venv(self) -> Path:
        """Return an environment for the wheel, with nothing but itself on its PATH."""
        folder = self.clone / "build" / "venv"
        if not folder.exists():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        return folder

    def run(self, command: Command) -> str:
        """Run a command to its end; return what it printed. Raises Wrong."""
        process = self.start(command.text, stdin=subprocess.PIPE)
        try:
            printed, _ = process.communicate(command.input, MINUTES * 60)
        finally:
            end(process, signal.SIGKILL)
        if process.returncode:
            raise Wrong(f"exit status {process.returncode}: {printed[-2000:]}")
        return printed

    @contextmanager
    def serving(self, text: str) -> Iterator[tuple[str, list[str]]]:
        """Start a server; yield its address and the lines that it prints. Ctrl-C ends it, and must. Raises
        Wrong."""
        lines: list[str] = []
        process = self.start(text, stdin=subprocess.DEVNULL)
        assert process.stdout is not None
        reading = Thread(target=lines.extend, args=(process.stdout,))
        reading.start()
        try:
            while not (ready := READY.search("".join(lines))):
                if process.poll() is not None:
                    reading.join()
                    raise Wrong(f"the server ended: {''.join(lines)[-2000:]}")
                time.sleep(0.1)
            yield ready[1], lines
        finally:
            end(process, signal.SIGINT)
            reading.join()


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a command's processes, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, number)
    try:
        process.wait(90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise Wrong("Ctrl-C does not end it") from None


def ask(address: str) -> None:
    """Ask a server for text or, where it has none, an embedding; connect to a draft service. Raises Wrong."""
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        socket.create_connection((host, int(port)), 10).close()
        return
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    if "embedding" in model:
        (vector,) = post(f"{address}/v1/embeddings", {"model": model, "input": "a ship"})["data"]
        answered = bool(vector["embedding"])
    else:
        messages = [{"role": "user", "content": "What is 12 + 7?"}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
        answered = post(f"{address}/v1/chat/completions", body)["usage"]["completion_tokens"] > 0
    if not answered:
        raise Wrong("the server answers with nothing")


def try_curl(reader: Reader, lines: list[str]) -> None:
    """Run the curl that a server prints. Raises Wrong."""
    shown = [line.strip() for line in lines if line.strip().startswith("curl ")]
    printed = reader.run(Command(shown[0])) if shown else ""
    if "data: [DONE]" not in printed:
        raise Wrong(f"the printed curl does not work: {shown}: {printed[-500:]}")


def post(url: str, body: object) -> Any:
    """Return the answer to a JSON body."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def check(reader: Reader, command: Command) -> None:
    """Run a command as typed and compare. Raises Wrong."""
    text, loose = command.text, bool(LOOSE.match(command.text))
    if text.startswith("source "):
        reader.run(command)
        reader.activated = True
        return
    if SERVER.match(text) and not ANSWERS.search(text):
        with reader.serving(text) as (address, lines):
            ask(address)
            if text.startswith("make"):
                try_curl(reader, lines)
        printed = "".join(lines)
    else:
        with reader.serving("streamserve serve") if ASKS.match(text) else nullcontext():
            printed = reader.run(command)
    if piece := missing(command.shown, printed, loose):
        raise Wrong(f"not printed: {piece}\nprinted: {printed[-2000:]}")
    for port in PORTS:
        free(port)
    made = {"make wheel": "dist/streamserve-*.whl", "make docs": "build/site/index.html"}.get(text)
    made = "results.jsonl" if text.startswith("streamserve batch") else made
    if made and not list(reader.clone.glob(made)):
        raise Wrong(f"{made} was not made")


def free(port: int) -> None:
    """Raise Wrong if something listens on the port."""
    with socket.socket() as probe:
        if not probe.connect_ex(("127.0.0.1", port)):
            raise Wrong(f"port {port} is in use")


def clone_of(root: Path, clone: Path) -> None:
    """Clone a repository, with its files as they are now: changed ones and new ones included."""
    subprocess.run(["git", "clone", "--quiet", root, clone], check=True)
    if changes := _git(root, "diff", "--binary", "HEAD"):
        subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=clone, input=changes, check=True)
    for name in map(os.fsdecode, filter(None, _git(root, *NEW_FILES).split(b"\0"))):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, clone / name)


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout


@contextmanager
def prepared(clone: Path) -> Iterator[Reader]:
    """Clone the repository, add what the README names, and serve a hub with it."""
    from tests.checkpoints import make_checkpoint
    from tests.embedders import make_embedder
    from tests.ggufs import write_gguf
    from tests.hub.server import FakeHub, Repository, folder_content, serving

    clone_of(ROOT, clone)
    if (ROOT / "build" / "kernels").exists():  # of `make wheel`: minutes of compilation
        shutil.copytree(ROOT / "build" / "kernels", clone / "build" / "kernels", symlinks=True)
    models = [make_checkpoint(clone / name) for name in ("MODEL", "SMALL_MODEL", "models/my-llama")]
    write_gguf(models[0], clone / "model-Q4_K_M.gguf")
    embedder = make_embedder(clone / "models" / "embedder")
    body = {"model": "embedded", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (torch,) = re.findall(r"^TORCH_PIP_ARGS \?= (.*)$", (clone / "Makefile").read_text(), re.MULTILINE)
    (clone / "constraint.txt").write_text(f"{torch}\n")  # the wheel gets the same build, which is cached
    (clone / "requests.jsonl").write_text(json.dumps(request) + "\n")
    gguf = {"model-Q4_K_M.gguf": (clone / "model-Q4_K_M.gguf").read_bytes()}
    repositories = {
        "owner/model": Repository({"main": folder_content(models[0]) | gguf}),
        "owner/other": Repository({"main": folder_content(models[1])}),
        "owner/embedding-model": Repository({"main": folder_content(embedder)}),
    }
    with serving(FakeHub(repositories)) as hub:
        yield Reader(clone, hub.url)


def main() -> int:
    """Run all commands; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="also run `make test`")
    parser.add_argument("--report", type=Path, help="write the counts to this file")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    wrong, count = 0, 0
    for port in PORTS:
        free(port)
    with (
        tempfile.TemporaryDirectory(prefix="streamserve-readme-") as folder,
        prepared(Path(folder) / "clone") as reader,
    ):
        for command in commands((reader.clone / "README.md").read_text()):
            if command.text.startswith("make test") and not arguments.tests:
                continue
            began, count, result = time.monotonic(), count + 1, "ok"
            try:
                check(reader, command)
            except (Wrong, OSError, subprocess.TimeoutExpired) as error:
                wrong, result = wrong + 1, f"WRONG: {error}"
            print(f"{time.monotonic() - began:6.1f} s  {command.text}: {result}", flush=True)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps({"passed": count - wrong, "failed": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
