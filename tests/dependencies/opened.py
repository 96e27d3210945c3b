"""The files of a repository that a program opens, by itself and in the processes that it starts.

    python -m tests.dependencies.opened tests/test_serve.py ...    run test files; say what closures lack

Linux reports each file that is opened in a watched folder (inotify), whoever opens it: nothing else may use
the folder meanwhile. Files that no closure has are left out: caches, and results that are only written.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.dependencies.tree import RESULTS, Tree, is_in, read

IN_OPEN, IN_Q_OVERFLOW = 0x20, 0x4000
HEADER = 16
"""Bytes of an event before the name: watch, mask, cookie and the length of the name, 32 bits each."""
COMPILED = re.compile(r"(.*/)__pycache__/(\w+)\.cpython-.*")
POLL_SECONDS = 0.05


class Watch:
    """Notes which files are opened in the folders that have files of a tree."""

    def __init__(self, tree: Tree) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._folders: dict[int, str] = {}
        self.opened: set[str] = set()
        for folder in {f"{os.path.dirname(name)}/".lstrip("/") for name in tree.files}:
            for inner in (folder, f"{folder}__pycache__/"):
                path = os.fsencode(tree.root / inner)
                if (watch := library.inotify_add_watch(self._descriptor, path, IN_OPEN)) > 0:
                    self._folders[watch] = inner

    def drain(self) -> None:
        """Note the files that have been opened until now. Raises OverflowError if some were missed."""
        while True:
            try:
                events = memoryview(os.read(self._descriptor, 1 << 20))
            except BlockingIOError:
                return
            while events:
                watch, mask, _, length = events[:HEADER].cast("i")
                if mask & IN_Q_OVERFLOW:
                    raise OverflowError("too many files are opened")
                name = bytes(events[HEADER : HEADER + length]).rstrip(b"\0")
                path = self._folders.get(watch, "") + os.fsdecode(name)
                self.opened.add(COMPILED.sub(r"\1\2.py", path))
                events = events[HEADER + length :]

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def watching(tree: Tree) -> Iterator[Watch]:
    """Watch the folders of a tree until the block ends."""
    watch = Watch(tree)
    try:
        yield watch
    finally:
        watch.close()


def opened_by(tree: Tree, test: str) -> tuple[set[str], str]:
    """Run a test file; return the files that were opened meanwhile, and the output."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    paths = os.pathsep.join([str(tree.root / "src"), str(tree.root)])
    with watching(tree) as watch:
        output = _run(watch, command, tree.root, os.environ | {"PYTHONPATH": paths})
    return {name for name in watch.opened & tree.files.keys() if not is_in(name, RESULTS)}, output


def _run(watch: Watch, command: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while True:
        try:
            output, _ = process.communicate(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            watch.drain()
            continue
        watch.drain()
        return output


def main() -> int:
    """Run the command; returns 1 if a test file opens what its closure lacks."""
    tree, lacking = read(), False
    for test in sys.argv[1:]:
        opened, output = opened_by(tree, test)
        beyond = sorted(opened - set(tree.closure([test])))
        outcome = output.strip().rpartition("\n")[2]
        print(f"{test}: {len(opened)} files opened, {len(beyond)} of them not in its closure; {outcome}")
        for name in beyond:
            print(f"  {name}")
        lacking = lacking or bool(beyond)
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main())
