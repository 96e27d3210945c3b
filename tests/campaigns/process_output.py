"""Capture the output of processes during a trial, and search it for errors."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.campaigns.outcome import TRACEBACK, TrialFailure

FAULTS = re.compile(
    r"^Traceback \(most recent call last\)|was never retrieved|Task was destroyed|never awaited"
    r"|a task of the fleet failed|Fatal Python error|terminate called|Segmentation fault",
    re.MULTILINE,
)
CONTEXT = 900
CHAIN = ("During handling of the above", "The above exception was")
"""Prefixes of the line between two chained tracebacks."""


class Captured:
    """The output of this process and its children since the block began."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def text(self) -> str:
        return self._path.read_text(errors="replace")

    def check(self) -> None:
        """Raise TrialFailure if the output contains a traceback."""
        fault = first_fault(self.text())
        if fault:
            raise TrialFailure(TRACEBACK, fault)


def first_fault(text: str) -> str:
    """Return the end of the first traceback in a log, or a line that reports another fault; empty if there is
    none."""
    found = FAULTS.search(text)
    if not found:
        return ""
    lines: list[str] = []
    for line in text[found.start() :].splitlines():
        lines.append(line)
        inside = line.startswith((" ", "Traceback", *CHAIN)) or not line
        if not inside and not _goes_on(text, line):
            break
    return "\n".join(lines)[-CONTEXT:]


def _goes_on(text: str, line: str) -> bool:
    """Return whether the traceback that ends with `line` is followed by another of its chain."""
    return any(f"{line}\n\n{words}" in text for words in CHAIN)


@contextmanager
def captured() -> Iterator[Captured]:
    """Redirect output to a file in the block: file descriptors 1 and 2, which children inherit."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        saved = os.dup(1), os.dup(2)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield Captured(Path(log.name))
        finally:
            for number, old in enumerate(saved, 1):
                os.dup2(old, number)
                os.close(old)
