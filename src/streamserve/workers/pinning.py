"""CPU pinning of a worker's main thread."""

import logging
import os

from streamserve.execution.backends.native.cores import ReservedCores
from streamserve.execution.loading.loaded import Loaded

logger = logging.getLogger(__name__)


def pin_threads(cores: ReservedCores, loaded: Loaded) -> None:
    """Pin the main thread to the first core of the kernels' thread pool.

    Without a thread pool, release the cores.
    """
    if loaded.pool:
        os.sched_setaffinity(0, cores.cpus[:1])
        logger.info("threads pinned to CPUs %s", ", ".join(map(str, cores.cpus)))
    else:
        cores.release()
