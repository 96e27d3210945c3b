"""Limit resources for tests: open files, memory, size of file systems; and make the wall clock jump."""

import errno
import mmap
import os
import resource
import shutil
import struct
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")

CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long long *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CLOCK_OFFSET_FILE");
    int file = path ? open(path, O_RDONLY) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
}

static long long jumped(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t clock, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, out);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) out->tv_sec += jumped();
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(out, zone);
    out->tv_sec += jumped();
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""
"""Preloaded before the C library: adds the seconds in a file to the wall clock."""


class Clock:
    """An adjustable wall clock for processes that run with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._offset = folder / "offset"
        self._offset.write_bytes(bytes(mmap.PAGESIZE))
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(CLOCK_SOURCE)
        compiler = shutil.which("cc") or shutil.which("gcc") or sysconfig.get_config_var("CC")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(self._offset)}

    def jump(self, seconds: int) -> None:
        """Set the clock this far ahead of the machine's clock."""
        with self._offset.open("r+b") as file:
            file.write(struct.pack("<q", seconds))


def limit_open_files(count: int) -> Callable[[], None]:
    """Return a function that limits a new process to this number of open files."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@contextmanager
def memory_limit(size: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Return the kind of limit, and a function that limits a new process and its children to this number of
    bytes. A control group of version 1 or 2 is used if one can be created; otherwise the address space of
    each process is limited to eight times the bytes, since it is far larger than the memory used."""
    group = _group(size)
    if group is None:
        limit = 8 * size
        yield "RLIMIT_AS", lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return
    try:
        yield str(group), lambda: _join(group)
    finally:
        _remove(group)


def _group(size: int) -> Path | None:
    for parent, limit in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        try:
            group = Path(tempfile.mkdtemp(prefix="streamserve-test-", dir=parent))
        except OSError:
            continue
        try:
            (group / limit).write_text(str(size))
            return group
        except OSError:
            group.rmdir()
    return None


def _remove(group: Path) -> None:
    """Remove a control group. A killed process leaves its group a moment after it was waited for."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def can_mount() -> bool:
    """Return whether this user may mount file systems."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def small_folder(path: str, kilobytes: int) -> list[str]:
    """Return a prefix for a command that runs with `path` as a file system of this size."""
    mount = f'mount -t tmpfs -o size={kilobytes}k tmpfs "$0" && exec "$@"'
    return ["unshare", "-m", "sh", "-c", mount, path]


def fill(process: int, folder: str) -> Path:
    """Fill a folder to the last byte, as a process sees it; return the file."""
    path = Path(f"/proc/{process}/root{folder}/filling")
    with path.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return path
