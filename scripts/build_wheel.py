"""Build a wheel that needs no compiler: the package, and its kernels compiled for each level of x86-64. Build
the wheel of the client, too, which needs neither.

The compiler is zig's (clang and libc++), which can target an old glibc on any machine; libc++ is linked
statically. Libraries and wheels depend on the sources alone: the same sources give the same bytes. Compiled
libraries are kept in build/kernels, so that only a change of the kernels takes minutes.

    python scripts/build_wheel.py [--out dist]      needs: pip install ".[wheel]"
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import streamserve
from streamserve.execution.backends.native.build import COMMON_FLAGS, SOURCES
from streamserve.execution.backends.native.levels import LEVELS, Level
from streamserve.execution.backends.native.packaged import FOLDER, file_name

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"
TAG = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_x86_64"
TARGET = ("-target", f"x86_64-linux-gnu.{GLIBC}")
LINK_FLAGS = (*TARGET, "-mcpu=x86_64", "-O3", "-shared", "-fPIC", "-pthread", "-s")
"""Flags that link a library: libc++ is for any processor, so that it is compiled once."""
PURE_TAG = "py3-none-any"
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src", "client")
"""What of the repository the wheels are made of."""
TIME = (2020, 1, 1, 0, 0, 0)
"""The date of the files in a wheel."""
EXPORTS = "{ global: ss_*; local: *; };\n"
"""The linker's list of exported names: libc++'s are not, since another C++ library is in the process."""


class WheelError(Exception):
    """The wheel cannot be built, or is not what it says."""


def compile_flags(level: Level) -> list[str]:
    """Return the flags that compile a source for a level."""
    extensions = "".join(f"+{name.replace('-', '_')}" for name in level.extensions)
    machine = f"-mcpu={level.base.replace('-', '_')}{extensions}"
    return [*TARGET, machine, *COMMON_FLAGS, "-fomit-frame-pointer"]


def digest() -> str:
    """Return a hash of everything that the compiled libraries depend on."""
    inputs = hashlib.blake2b(digest_size=12)
    for source in sorted(SOURCES.iterdir()):
        inputs.update(f"{source.name}\0{source.read_text()}\0".encode())
    inputs.update(repr([compile_flags(level) for level in LEVELS]).encode())
    inputs.update(f"{LINK_FLAGS}{EXPORTS}{version('ziglang')}".encode())
    return inputs.hexdigest()


def compile_level(level: Level, folder: Path, jobs: int) -> Path:
    """Return a level's library in `folder`, compiled now if it is not there. Raises WheelError."""
    library = folder / file_name(level)
    if library.exists():
        return library
    print(f"compiling the kernels for {level.name}", flush=True)

    def compile_source(source: Path) -> str:
        compiled = folder / f"{level.name}-{source.stem}.o"
        _zig(folder, *compile_flags(level), "-c", str(source), "-o", str(compiled))
        return str(compiled)

    with ThreadPoolExecutor(jobs) as threads:
        compiled = list(threads.map(compile_source, sorted(SOURCES.glob("*.cpp"))))
    exports, unfinished = folder / "exports", folder / f"{library.name}.tmp"
    exports.write_text(EXPORTS)
    _zig(folder, *LINK_FLAGS, f"-Wl,--version-script={exports}", *compiled, "-o", str(unfinished))
    return unfinished.rename(library)


def _zig(folder: Path, *arguments: str) -> None:
    """Run the compiler, whose cache is next to `folder`. Raises WheelError."""
    caches = {name: str(folder.parent / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    command = [sys.executable, "-m", "ziglang", "c++", *arguments]
    done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"zig {' '.join(arguments)}: {done.stderr.strip()[-2000:]}")


def pure_wheel(folder: Path, project: str = ".") -> Path:
    """Return the wheel without libraries that setuptools makes of a copy of the sources. `folder` is empty.

    `project`: the distribution's folder in the repository.
    """
    copy, out = folder / "copy", folder / "pure"
    copy.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
            )
        else:
            shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out]
    subprocess.run([*command, copy / project], check=True)
    return next(out.glob("*.whl"))


def pack(pure: Path, libraries: Mapping[str, Path], out: Path) -> Path:
    """Write the wheel of `pure` and `libraries` (by their paths in it) to the folder `out`; return it.

    Without libraries, the wheel is for any machine.
    """
    tag = TAG if libraries else PURE_TAG
    with zipfile.ZipFile(pure) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    del files[record]
    files |= {name: path.read_bytes() for name, path in libraries.items()}
    described = record.replace("RECORD", "WHEEL")
    lines = files[described].decode().splitlines()
    kept = [line for line in lines if line.partition(":")[0] not in ("Tag", "Root-Is-Purelib", "")]
    pure_or_not = f"Root-Is-Purelib: {str(not libraries).lower()}"
    files[described] = "\n".join([*kept, pure_or_not, f"Tag: {tag}", ""]).encode()
    files = dict(sorted(files.items(), key=lambda item: (".dist-info/" in item[0], item[0])))
    rows = [f"{name},sha256={_sha256(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    name, number = pure.name.split("-")[:2]
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{name}-{number}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, TIME)
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return wheel


def _sha256(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def audit(wheel: Path) -> None:
    """Raise WheelError if auditwheel finds that the wheel needs more than its tag says."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = " ".join(done.stdout.split())
    found = re.search(r'consistent with the following platform tag: "manylinux_(\d+)_(\d+)_x86_64"', report)
    if not found or (int(found[1]), int(found[2])) > tuple(map(int, GLIBC.split("."))):
        raise WheelError(f"auditwheel: {report}{done.stderr}")


def path_in_wheel(level: Level) -> str:
    """Return the path of a level's library in the wheel: there the package looks for it."""
    return (FOLDER / file_name(level)).relative_to(Path(streamserve.__file__).parents[1]).as_posix()


def build(out: Path, jobs: int) -> Path:
    """Build the wheel in the folder `out`, with `jobs` compilers at a time; return it. Raises WheelError."""
    folder = ROOT / "build" / "kernels" / digest()
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {path_in_wheel(level): compile_level(level, folder, jobs) for level in LEVELS}
    with tempfile.TemporaryDirectory() as temporary:
        wheel = pack(pure_wheel(Path(temporary)), libraries, out)
    audit(wheel)
    return wheel


def build_client(out: Path) -> Path:
    """Build the wheel of the client in the folder `out`; return it."""
    with tempfile.TemporaryDirectory() as temporary:
        return pack(pure_wheel(Path(temporary), "client"), {}, out)


def main() -> None:
    """Build both wheels and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder to write them to")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    arguments = parser.parse_args()
    try:
        print(build(arguments.out, arguments.jobs), build_client(arguments.out), sep="\n")
    except WheelError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
