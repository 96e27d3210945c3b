"""Compiling the kernels on first use, once for each processor, compiler and version of the sources.

The result lies in the user's cache folder. Code is loaded from there, so a folder or file that somebody else
could have written is refused.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
# No -ffast-math and no contraction: what is rounded when is part of what the kernels promise.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-pthread",
    "-w",
)


KEPT = 8
"""How many libraries stay in the cache: a few versions of us, or processors that share a home."""


class NativeCacheError(Exception):
    """The cache of compiled kernels could have been written by somebody else; exit instead of loading it."""


class BuildFailed(Exception):
    """The kernels cannot be had on this machine; what is said is for the log."""


def cache_folder() -> Path:
    """Where compiled kernels are kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "streamserve" / "native"


def find_compiler() -> str:
    """The C++ compiler: what CXX names, or the first of the usual ones. Raises BuildFailed without one."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildFailed("there is no C++ compiler (g++, clang++ or what CXX names)")


def build(folder: Path | None = None, flags: Sequence[str] = FLAGS) -> Path:
    """The compiled library, from the cache in `folder` or made now. Any number of processes may ask at once.

    Raises NativeCacheError for a cache that others could write, BuildFailed if there is no library.
    """
    folder = folder or cache_folder()
    compiler = find_compiler()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BuildFailed(f"{folder} cannot be made: {error}") from error
    _refuse_foreign(folder)
    library = folder / f"{_key(compiler, flags)}.so"
    with _locked(folder / "lock"):
        if not library.exists():
            _compile(compiler, flags, library)
        else:
            os.utime(library)
        _prune(folder)
    _refuse_foreign(library)
    return library


def _prune(folder: Path) -> None:
    """Leave the libraries used last, under the lock. One that is loaded lives on without its name."""
    libraries = sorted(folder.glob("*.so"), key=lambda path: path.lstat().st_mtime_ns)
    for path in libraries[:-KEPT]:
        path.unlink()


def _key(compiler: str, flags: Sequence[str]) -> str:
    """Everything that the library's code depends on."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(SOURCES.iterdir()):
        digest.update(f"{source.name}\0{source.read_text()}\0".encode())
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest.update("\0".join([compiler, version, *flags, _processor()]).encode())
    return digest.hexdigest()


def _processor() -> str:
    """The processor's model and features, as Linux tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return " ".join(os.uname())
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    first = lines[: lines.index("")] if "" in lines else lines
    return "\n".join(line for line in first if line.partition("\t")[0].partition(":")[0].strip() in wanted)


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Compile to a file of another name, then rename: a library that is there is whole."""
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    handle, name = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    log.info("compiling kernels for this processor (once)")
    try:
        done = subprocess.run(
            [compiler, *flags, *sources, "-o", name], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BuildFailed(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        os.chmod(name, 0o700)
        os.rename(name, library)
    finally:
        Path(name).unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.geteuid():
        raise NativeCacheError(
            f"{path} belongs to another user: kernels are not loaded from it (set XDG_CACHE_HOME)"
        )
    if stat.S_ISLNK(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeCacheError(
            f"{path} can be changed by other users: kernels are not loaded from it (chmod go-w {path})"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
