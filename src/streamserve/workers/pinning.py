"""Where a worker's main thread runs."""

import logging
import os

from streamserve.execution.cores import Cores
from streamserve.execution.load import Loaded

logger = logging.getLogger(__name__)


def settle(cores: Cores, loaded: Loaded) -> None:
    """Go where the kernels' other threads are waiting for this one; without kernels nobody is pinned."""
    if loaded.team:
        os.sched_setaffinity(0, cores.numbers[:1])
        logger.info("threads on processors %s", ", ".join(map(str, cores.numbers)))
    else:
        cores.release()
