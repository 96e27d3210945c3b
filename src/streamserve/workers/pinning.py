"""CPU pinning of a worker's main thread."""

import logging
import os

from streamserve.execution.cores import Cores
from streamserve.execution.load import Loaded

logger = logging.getLogger(__name__)


def settle(cores: Cores, loaded: Loaded) -> None:
    """Pin the main thread to the first core of the kernels' thread pool; without a thread pool, release the
    cores."""
    if loaded.team:
        os.sched_setaffinity(0, cores.numbers[:1])
        logger.info("threads on processors %s", ", ".join(map(str, cores.numbers)))
    else:
        cores.release()
