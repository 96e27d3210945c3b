"""A timeline file for Chrome (chrome://tracing) and ui.perfetto.dev: the steps of each process, and above
them the spans of each request."""

import json
import os
from pathlib import Path
from typing import Any

from streamserve.fleet.tracing.recorder import TraceSpan

STEPS = 0
"""The thread on which a process's steps are shown."""


class Timeline:
    """Writes one event per line as it arrives, so that the file is readable even if the server crashes.
    Raises OSError if the file cannot be written."""

    def __init__(self, path: str | Path) -> None:
        # A pipe must never block the event loop: one without a reader is refused, a full one is an error.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        self._file = open(os.open(path, flags, 0o666), "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._file.write("[\n")
        self._processes: dict[str, int] = {}

    def add(self, span: TraceSpan) -> None:
        """Write a span. Steps are bars on their process's thread. A request's spans overlap, so they are
        async tracks; lifecycle events are marks."""
        process = self._process(span.process)
        if span.name == "step":
            duration = _micros(span.end - span.start)
            shown = {"ph": "X", "ts": _micros(span.start), "dur": duration, "args": {"tokens": span.tokens}}
            self._write(name="step", pid=process, tid=STEPS, **shown)
            return
        common = {"cat": "request", "id": span.request, "pid": process, "tid": STEPS}
        args = {"request": span.request}
        if span.end > span.start:
            self._write(name=span.name, ph="b", ts=_micros(span.start), args=args, **common)
        for name, at in span.events or (() if span.end > span.start else ((span.name, span.start),)):
            self._write(name=name, ph="n", ts=_micros(at), args=args, **common)
        if span.end > span.start:
            self._write(name=span.name, ph="e", ts=_micros(span.end), **common)

    def close(self) -> None:
        """Complete the file."""
        self._file.write("{}]\n")
        self._file.close()

    def _process(self, name: str) -> int:
        """Return the number of a process; the first time, write its name."""
        if name not in self._processes:
            self._processes[name] = len(self._processes)
            self._write(name="process_name", ph="M", pid=self._processes[name], args={"name": name})
        return self._processes[name]

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + ",\n")


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)
