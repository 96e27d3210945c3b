"""The `streamserve` command in forks of a process that has imported torch, which takes longer than most
commands. Everything of streamserve and of the library of the hub is imported after the fork."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

PARENT = """
import json, os, sys
import httpx, msgspec, numpy, pydantic, safetensors, torch, tqdm, typer, yaml
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(asked["environment"])
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.dup2(os.open(os.path.join(asked["folder"], name), os.O_RDWR), number)
        sys.stdin = open(0)
        sys.argv = ["streamserve", *asked["arguments"]]
        from streamserve.__main__ import main
        sys.exit(main())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Run(Protocol):
    """Run `streamserve` with arguments, in an environment; return what it printed and its exit status."""

    def __call__(
        self, arguments: list[str], environment: Mapping[str, str], input: str = ""
    ) -> subprocess.CompletedProcess[str]: ...


@contextmanager
def forking() -> Iterator[Run]:
    """Start the process whose forks run commands, one at a time."""
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as parent,
    ):

        def run(
            arguments: list[str], environment: Mapping[str, str], input: str = ""
        ) -> subprocess.CompletedProcess[str]:
            assert parent.stdin
            assert parent.stdout
            for name, text in (("stdin", input), ("stdout", ""), ("stderr", "")):
                (Path(folder) / name).write_text(text)
            asked = {"folder": folder, "arguments": arguments, "environment": dict(environment)}
            parent.stdin.write(json.dumps(asked) + "\n")
            parent.stdin.flush()
            status = int(parent.stdout.readline())
            printed = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(arguments, status, *printed)

        yield run
