"""The processes of this package among the descendants of one."""

import psutil

WORKER, FORK_SERVER = "streamserve.workers", "streamserve.workers.fork_server"


def workers_below(pid: int) -> list[psutil.Process]:
    """Return the running workers below a process, whichever way they were started."""
    return running_below(pid, WORKER)


def running_below(pid: int, *modules: str) -> list[psutil.Process]:
    """Return the processes below one that run one of these modules of Python."""
    below = psutil.Process(pid).children(recursive=True)
    return [process for process in below if not set(modules).isdisjoint(words(process))]


def words(process: psutil.Process) -> list[str]:
    """Return a process's command line, also where it is one text (a forked worker's); empty if it ended."""
    try:
        return " ".join(process.cmdline()).split()
    except psutil.Error:
        return []
