"""Find the processes of this package that belong to a process: its descendants, and processes that
command_server.py's fork server has forked for it."""

import os

import psutil

WORKER, FORK_SERVER = "streamserve.workers", "streamserve.workers.fork_server"


def workers_below(pid: int) -> list[psutil.Process]:
    """Return the running workers below a process, whichever way they were started."""
    return running_below(pid, WORKER)


def running_below(pid: int, *modules: str) -> list[psutil.Process]:
    """Return the processes below a process that run one of these Python modules."""
    below = psutil.Process(pid).children(recursive=True)
    if pid != os.getpid():
        of_tests = psutil.Process().children(recursive=True)
        servers = [process for process in of_tests if words(process)[-2:] == ["for", str(pid)]]
        below += [*servers, *(child for server in servers for child in server.children(recursive=True))]
    return [process for process in below if not set(modules).isdisjoint(words(process))]


def words(process: psutil.Process) -> list[str]:
    """Return a process's command line as words, also if it is a single text (a forked worker's); empty if the
    process ended."""
    try:
        return " ".join(process.cmdline()).split()
    except psutil.Error:
        return []
