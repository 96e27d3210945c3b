"""A process of one rank of a tensor-parallel model (ranks.py); its standard input tells it what to do."""

import os
import sys
import threading
import time

from streamserve.execution.cuda.load import load_rank
from streamserve.execution.cuda.ranks import Start, follow, read

PARENT_SECONDS = 0.5
"""Interval of checks whether the leader still runs: a rank may be waiting for it on the device."""


def exit_with_leader(leader: int) -> None:
    """End this process when the leader has ended in any way."""
    while os.getppid() == leader:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def main() -> int:
    """Load the rank, follow the leader, and end with it."""
    threading.Thread(target=exit_with_leader, args=(os.getppid(),), daemon=True).start()
    start = read(sys.stdin.buffer, Start)
    runner, ranks, host = load_rank(start)
    follow(sys.stdin.buffer, runner, ranks, host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
