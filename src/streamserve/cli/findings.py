"""Findings of `streamserve doctor` about the machine: memory, processors, folders, address, versions.

Each finding is derived from values that are read elsewhere, so that tests can describe any machine.
"""

import contextlib
import errno
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamserve import __version__
from streamserve.api.http.server import BindError, bind
from streamserve.system.processors import Processors

LITTLE_MEMORY = 2 << 30
LITTLE_DISK = 1 << 30
FEW_FILES = 1024


class Verdict(StrEnum):
    """The meaning of a finding for a server. `SLOW`: it serves, but not as well as it could. `FAIL`: it
    cannot start."""

    OK = "ok"
    SLOW = "slow"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report: its subject, the observation, and advice unless the verdict is `OK`."""

    verdict: Verdict
    subject: str
    text: str
    advice: str = ""


def version_findings(packages: Sequence[str] = ("torch", "numpy", "tokenizers")) -> list[Finding]:
    """Return the versions of Python, of this package, and of `packages`, which must be installed."""
    python = f"streamserve {__version__}, Python {platform.python_version()}"
    found, missing = [python], []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    findings = [Finding(Verdict.OK, "versions", ", ".join(found))]
    if missing:
        names = " ".join(missing)
        findings.append(Finding(Verdict.FAIL, "packages", f"not installed: {names}", f"pip install {names}"))
    return findings


def import_finding(name: str = "torch") -> Finding:
    """Return whether a package can be imported. An installed package may be built for another machine."""
    try:
        __import__(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding(
            Verdict.FAIL, name, f"cannot be imported: {reason:.200}", f"pip install --force-reinstall {name}"
        )
    return Finding(Verdict.OK, name, "can be imported")


def processor_finding(name: str, usable: Processors, present: int) -> Finding:
    """Return how many of the machine's `present` processors a server may use. `name` is the kind of
    processor."""
    text = f"{name}: {usable}, of {present} present"
    if usable.quota is not None and usable.quota < 1:
        return Finding(
            Verdict.SLOW,
            "processor",
            f"{text}; the quota stops every thread for a part of the time",
            "give the container at least one whole processor",
        )
    if len(usable.cpus) < present or usable.quota is not None:
        return Finding(
            Verdict.SLOW,
            "processor",
            f"{text}; threads that can run at the same time: {usable.threads}",
            "widen the affinity mask (taskset, cpuset) or the CPU quota of the container to use the others",
        )
    return Finding(Verdict.OK, "processor", text)


def memory_finding(available: int) -> Finding:
    """Return whether `available` bytes, within control groups, suffice for more than a small model."""
    text = f"{available / 1e9:.1f} GB are available; by default the KV cache takes 40 % of them"
    if available < LITTLE_MEMORY:
        return Finding(
            Verdict.SLOW,
            "memory",
            text,
            "only small models fit: end other processes, raise the container's limit, or quantize the model "
            "(--quantization int4)",
        )
    return Finding(Verdict.OK, "memory", text)


def address_finding(host: str, port: int) -> Finding:
    """Return whether a server could listen on this address now."""
    try:
        bind(host, port).close()
    except BindError as error:
        return Finding(
            Verdict.FAIL, "address", str(error), "choose another --host or --port, here and for the server"
        )
    return Finding(Verdict.OK, "address", f"{host}, port {port} is free")


def folder_finding(subject: str, folder: Path, without: str, variable: str) -> Finding:
    """Return whether a cache folder, or its first existing parent, can be written and has free space.
    `without` is the consequence of having no folder; `variable` is the environment variable that moves it."""
    try:
        present = _nearest(folder)
        free = shutil.disk_usage(present).free
    except OSError as error:  # it may be in a folder of another user, or its name may be too long
        reason = f"{folder} cannot be used ({error.strerror}): {without}"
        return Finding(Verdict.SLOW, subject, reason, f"set {variable} to another folder")
    text = f"{folder}: {free / 1e9:.1f} GB free"
    if not (present.is_dir() and os.access(present, os.W_OK | os.X_OK)):
        return Finding(
            Verdict.SLOW,
            subject,
            f"{folder} cannot be written: {without}",
            f"make {present} writable, or set {variable} to another folder",
        )
    if free < LITTLE_DISK:
        return Finding(
            Verdict.SLOW,
            subject,
            f"{text}: {without}",
            f"free disk space, or set {variable} to another folder",
        )
    return Finding(Verdict.OK, subject, text)


def _nearest(folder: Path) -> Path:
    """Return the folder, or its first parent that exists. Raises OSError if that cannot be determined."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def sockets_finding() -> Finding:
    """Return whether the sockets between server and workers can be created in the temporary folder."""
    try:
        with tempfile.TemporaryDirectory(prefix="streamserve-doctor-") as folder:
            return Finding(Verdict.OK, "sockets", f"can be created in {Path(folder).parent}")
    except OSError as error:
        return Finding(
            Verdict.FAIL,
            "sockets",
            f"the temporary folder cannot be used: {error}",
            "set TMPDIR to a folder that can be written",
        )


def files_finding(limit: int | None = None) -> Finding:
    """Return how many files, and thus connections, the process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    text = (
        "any number of files may be open" if limit == resource.RLIM_INFINITY else f"{limit} files may be open"
    )
    if 0 <= limit < FEW_FILES:
        return Finding(
            Verdict.SLOW,
            "files",
            f"{text}, and each connection counts as one",
            "raise the limit: ulimit -n, or LimitNOFILE in the systemd unit",
        )
    return Finding(Verdict.OK, "files", text)
