"""Compile the kernels on first use: once for each processor (or bound of its instructions), compiler and
version of the sources.

The library is in the user's cache folder. Code is loaded from there, so a folder or file that another user
could have written is refused. A damaged library is compiled again.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from streamserve.execution.backends.native.levels import Level, lesser_level
from streamserve.protocol.config import KernelPath
from streamserve.protocol.errors import CheckpointError
from streamserve.system.processors import usable_processors
from streamserve.system.user_folders import cache_folder

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
# No -ffast-math and no contraction: the kernels guarantee which operations round, so compilers agree on bits.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-pthread",
    "-w",
)
"""Compiler flags of every build of the kernels, here and in wheels (scripts/build_wheel.py)."""
FLAGS = ("-march=native", *COMMON_FLAGS)

COMPILING = "compiling-"
"""Prefix of the names of temporary folders in which kernels are compiled."""
LOCK = "lock"
"""Name of the file whose lock is held while files of its folder are made or deleted."""

DIGEST_BYTES = 16
"""Bytes of the hash at the end of a library."""
MAX_LIBRARY_BYTES = 256 << 20

MAX_LIBRARIES = 16
"""Maximum number of libraries in the cache, of less than 2 MB each. There may be several versions, processors
that share a home directory, and bounds of instructions."""


class NativeCacheError(CheckpointError):
    """The cache of compiled kernels could have been written by another user, and is not loaded. The message
    says what to do."""


class BuildFailed(Exception):
    """The kernels are not available on this machine; the message is for the log."""


def kernel_folder() -> Path:
    """Return the folder of this user's compiled kernels."""
    return cache_folder() / "native"


def find_compiler() -> str:
    """Return the path of the C++ compiler: the compiler that CXX names, or the first usual one that is
    installed. Raises BuildFailed if there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise BuildFailed("there is no C++ compiler (g++, clang++, or the compiler that CXX names)")


def level_flags(level: Level) -> tuple[str, ...]:
    """Return the flags of g++ and clang for a level."""
    return (f"-march={level.base}", *(f"-m{name}" for name in level.extensions), *COMMON_FLAGS)


def flags_up_to(bound: KernelPath | None = None) -> tuple[str, ...]:
    """Return the compiler flags for this processor, with at most the instructions of `bound` (default: the
    process's bound). Raises CheckpointError if the processor lacks the instructions."""
    level = lesser_level(bound)
    return level_flags(level) if level else FLAGS


def cached_library(folder: Path | None = None) -> Path | None:
    """Return the compiled library of these sources if it is in the cache and intact, otherwise None; nothing
    is compiled. Without a compiler, return the library that any other compiler made; raise BuildFailed if the
    cache has no such library."""
    folder, flags = folder or kernel_folder(), flags_up_to()
    try:
        library = folder / _file_name(find_compiler(), flags)
    except BuildFailed:
        other = _of_other_compiler(folder, flags)
        if other is None:
            raise
        return other
    return library if _is_intact(library) else None


def build(folder: Path | None = None, flags: Sequence[str] | None = None) -> Path:
    """Return the compiled library, from the cache in `folder` or compiled now with `flags` (default:
    `flags_up_to()`). Safe to call from any number of processes at the same time.

    A damaged library is compiled again. If the kernels cannot be compiled, the library of another compiler is
    returned: compilers agree on bits. Raises NativeCacheError for a cache that other users could write,
    BuildFailed or OSError if there is no library.
    """
    folder, flags = folder or kernel_folder(), flags_up_to() if flags is None else flags
    try:
        library = _built(folder, find_compiler(), flags)
    except (BuildFailed, OSError):
        other = _of_other_compiler(folder, flags)
        if other is None:
            raise
        library = other
    check_owner(library)
    return library


def _built(folder: Path, compiler: str, flags: Sequence[str]) -> Path:
    """Return the path of the kernels' library that `compiler` makes with `flags`. If it is not in the cache,
    it is compiled now. Raises the errors of `build`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildFailed(f"{folder} cannot be made: {error}") from error
    check_owner(folder)
    library = folder / _file_name(compiler, flags)
    if not _is_usable(library):  # checked without the lock, which a compilation may hold for half a minute
        with locked(folder / LOCK):
            if not _is_usable(library):
                _remove_damaged(library)
                _compile(compiler, flags, library)
            _prune(folder)
    return library


def _of_other_compiler(folder: Path, flags: Sequence[str]) -> Path | None:
    """Return the most recently used library of these sources and flags, of any compiler; None if there is
    none."""
    if not folder.is_dir():
        return None
    check_owner(folder)
    compiled = folder.glob(_file_name(None, flags))
    by_use = sorted(compiled, key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    return next((library for library in by_use if _is_usable(library)), None)


def _is_usable(library: Path) -> bool:
    """Return whether the library exists and is intact. If so, mark it as the most recently used one."""
    if not _is_intact(library):
        return False
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(library)
    return True


def _is_intact(library: Path) -> bool:
    """Return whether the library exists and ends with the hash of its other bytes, which `_compile` appends.
    Loading a damaged library would end the process. Raises NativeCacheError if another user could have
    written it."""
    try:
        status = library.lstat()
        if stat.S_ISDIR(status.st_mode):
            return False
        check_owner(library)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_LIBRARY_BYTES:
            return False
        content = library.read_bytes()
    except OSError:
        return False
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _remove_damaged(library: Path) -> None:
    """Remove a damaged library, or anything else at its path. To be called under the lock."""
    if not os.path.lexists(library):
        return
    log.warning("%s is damaged: the kernels are compiled again", library)
    if library.is_dir():
        shutil.rmtree(library)
    else:
        library.unlink()


def _prune(folder: Path) -> None:
    """Delete all libraries except the `MAX_LIBRARIES` most recently used ones. To be called under the lock. A
    process that has loaded a deleted library is not affected."""
    libraries = sorted(folder.glob("*.so"), key=lambda path: path.lstat().st_mtime_ns)
    for path in libraries[:-MAX_LIBRARIES]:
        path.unlink()
    for path in folder.glob(f"{COMPILING}*"):  # of processes that were killed
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("*.json"):  # rates measured with a library (paths.py)
        if not path.with_suffix(".so").exists():
            path.unlink()


def _file_name(compiler: str | None, flags: Sequence[str]) -> str:
    """Return the file name of a library: a hash of everything that its code depends on, then a hash of the
    same without the compiler. If `compiler` is None, return a glob pattern for the libraries of all
    compilers."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(SOURCES.iterdir()):
        digest.update(b"%s\0%s\0" % (source.name.encode(), source.read_bytes()))
    digest.update("\0".join([*flags, processor()]).encode())
    sources = digest.hexdigest()
    if compiler is None:
        return f"*-{sources}.so"
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(b"%s\0%s" % (version, compiler.encode()))
    return f"{digest.hexdigest()}-{sources}.so"


def processor() -> str:
    """Return the processor's model and features reported by Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return " ".join(os.uname())
    fields = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    first = lines[: lines.index("")] if "" in lines else lines
    return "\n".join(line for line in first if line.partition("\t")[0].partition(":")[0].strip() in fields)


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Compile in a temporary folder, then rename the library, so that an existing one is always complete.
    Raises BuildFailed."""
    log.info("compiling kernels for this processor: once, about 20 s")
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: -source.stat().st_size)
    with (
        tempfile.TemporaryDirectory(prefix=COMPILING, dir=library.parent) as folder,
        ThreadPoolExecutor(usable_processors().threads) as threads,
    ):
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        list(threads.map(partial(_run, compiler, *flags, "-c"), sources, objects))
        made = Path(f"{folder}/library.so")
        _run(compiler, *flags, *objects, made)
        with made.open("r+b") as file:  # the loader ignores bytes at the end
            file.write(_digest(file.read()))
        made.chmod(0o700)
        made.rename(library)


def _run(compiler: str, *arguments: str | Path) -> None:
    """Run the compiler; the last argument is the output file. Raises BuildFailed."""
    command = [compiler, *map(str, arguments[:-1]), "-o", str(arguments[-1])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise BuildFailed(f"{compiler} failed: {done.stderr.strip()[-2000:]}")


def check_owner(path: Path) -> None:
    """Raise NativeCacheError if another user could have written `path`."""
    status = path.lstat()
    if status.st_uid != os.geteuid():
        raise NativeCacheError(
            f"{path} belongs to another user: kernels are not loaded from it (set XDG_CACHE_HOME)"
        )
    if stat.S_ISLNK(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeCacheError(
            f"{path} can be changed by other users: kernels are not loaded from it (chmod go-w {path})"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of the file at `path`, which is created if it does not exist. Raises OSError."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
