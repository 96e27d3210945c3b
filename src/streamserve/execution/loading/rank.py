"""The process of one rank of a tensor-parallel model (ranks.py). It receives messages on standard input."""

import os
import sys
import threading
import time

from streamserve.execution.backends.cuda.ranks import RankStart, follow, read
from streamserve.execution.loading.device import load_rank

PARENT_SECONDS = 0.5
"""Interval in seconds of checks whether the leader still runs: a rank that waits for the leader on the device
does not read its standard input."""


def exit_with_leader(leader: int) -> None:
    """Wait until the process `leader` has ended in any way, then end this process."""
    while os.getppid() == leader:
        time.sleep(PARENT_SECONDS)
    os._exit(1)


def main() -> int:
    """Load the rank, and follow the leader until it ends."""
    threading.Thread(target=exit_with_leader, args=(os.getppid(),), daemon=True).start()
    start = read(sys.stdin.buffer, RankStart)
    runner, ranks, host = load_rank(start)
    follow(sys.stdin.buffer, runner, ranks, host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
