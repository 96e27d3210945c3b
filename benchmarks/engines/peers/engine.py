"""The benchmark's interface to an engine's process."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


class EngineError(RuntimeError):
    """An engine failed; the message is its output."""


class Process:
    """Manages a process and its children. Output goes to `log`, unless the process `answers` on standard
    output."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        cores: Sequence[int],
        answers: bool = False,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("w", encoding="utf-8") as output:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if answers else output,
                stderr=output,
                env=dict(variables),
                cwd=log.parent,
                text=True,
                start_new_session=True,  # so that the whole process group can be ended
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )

    def tree(self) -> list[psutil.Process]:
        """Return the process and all its descendants."""
        try:
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """Stop all of the engine's processes, including background work."""
        self._send(signal.SIGSTOP)

    def go(self) -> None:
        """Continue the engine's processes."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def memory(self) -> dict[str, float]:
        """Return the resident bytes of all processes: anonymous memory, and the total with file mappings and
        shared memory."""
        measured = {"RssAnon": 0.0, "VmRSS": 0.0}
        for process in self.tree():
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            for line in lines:
                name, _, rest = line.partition(":")
                if name in measured:
                    measured[name] += int(rest.split()[0]) * 1024
        return {"anonymous": measured["RssAnon"], "resident": measured["VmRSS"]}

    def end(self, grace: float) -> None:
        """Close the process's input, then kill its processes after `grace` seconds."""
        self.go()
        if self.popen.stdin is not None and not self.popen.stdin.closed:
            self.popen.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(grace)
        for process in self.tree():
            process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def last_words(self) -> str:
        """Return the end of the process's log."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])


class Engine(Process):
    """An engine that has loaded the model. `ready` is the seconds until its first token."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        cores: Sequence[int],
        load: Mapping[str, Any],
        first: Mapping[str, Any],
    ) -> None:
        started = time.perf_counter()
        super().__init__(command, variables, log, cores, answers=True)
        try:
            loaded = self._ask({"do": "load", **load})
            self.version, self.precision = loaded["version"], loaded["precision"]
            self.run(first)
        except BaseException:
            self.end(0)
            raise
        self.ready = time.perf_counter() - started

    def run(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """Return `seconds` and `answers`. Raises EngineError."""
        return self._ask({"do": "run", "work": work})

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        try:
            self.popen.stdin.write(json.dumps(order) + "\n")
            self.popen.stdin.flush()
            line = self.popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"it ended with status {self.popen.wait()}: {self.last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise EngineError(reply["error"])
        return reply
