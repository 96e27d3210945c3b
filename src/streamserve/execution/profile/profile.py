"""Profiles, the measured performance of a model on a machine, stored in the user's cache folder."""

import logging
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from streamserve.contracts.cost import SwapCost
from streamserve.execution.backends.native.levels import lesser_level
from streamserve.protocol.cost_curve import CostCurve
from streamserve.system.user_folders import cache_folder

log = logging.getLogger(__name__)

FORMAT = 4
MAX_BYTES = 1 << 20


class ProfiledMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine of a profile: the processor's name, the number of cores, and the worker's threads."""

    processor: str
    cores: int
    threads: int


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The subject of a profile: a machine, a model by its fingerprint, the formats of its numbers (`dtype`),
    and the backend ("native" with the key of the compiled kernels and their path, or "reference")."""

    machine: ProfiledMachine
    fingerprint: str
    dtype: str
    backend: str


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measurements of a subject.

    * `bandwidth` in bytes a second, `matrix_rate` of matrix products in operations a second.
    * `multiplier_rate`: the multipliers' rate with all numbers in registers, in operations a second; 0: not
      known.
    * `cost`: the seconds of steps. `floor`: their floor in seconds, over the same grid.
    * `swap`: the cost of swapping KV, by bytes.
    * `quick`: measured at the start of a server, on a coarse grid.
    * `stable`: no other process measured or computed meanwhile, and the rounds agreed. An unstable profile is
      used until it is measured again.
    """

    subject: Subject
    model: str
    measured: str
    quick: bool
    stable: bool
    rounds: int
    bandwidth: float
    matrix_rate: float
    multiplier_rate: float
    weight_bytes: int
    kv_token_bytes: int
    cost: CostCurve
    floor: tuple[tuple[float, ...], ...]
    swap: SwapCost | None = None
    format: int = FORMAT

    @property
    def peak_rate(self) -> float:
        """The upper bound of the rate of matrix products on this kernel path."""
        return max(self.matrix_rate, self.multiplier_rate)

    @property
    def summary(self) -> str:
        """The profile in one line, for logs."""
        return (
            f"{self.bandwidth / 1e9:.1f} GB/s, {self.matrix_rate / 1e9:.0f} GFLOP/s, "
            f"a step of 1 token {1e3 * self.cost(1):.2f} ms, of {self.cost.tokens[-1]} tokens "
            f"{1e3 * self.cost(self.cost.tokens[-1]):.2f} ms{'' if self.stable else ' (unstable)'}"
        )


@dataclass(frozen=True)
class ProfileStore:
    """The folder of stored profiles."""

    folder: Path

    def path(self, subject: Subject) -> Path:
        """Return the path of `subject`'s profile, whether it exists or not."""
        machine = subject.machine
        processor = re.sub(r"[^a-z0-9]+", "-", machine.processor.lower()).strip("-")[:60] or "processor"
        name = f"{processor}-{machine.cores}c-{machine.threads}t-{subject.fingerprint[:16]}"
        return self.folder / f"{name}-{subject.dtype}-{subject.backend}.json"

    def read(self, subject: Subject) -> Profile | None:
        """Return the stored profile of `subject`; None if there is none, if its file cannot be read, or if
        that has another subject or format."""
        path = self.path(subject)
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                raise ValueError(f"it is not a file of at most {MAX_BYTES} bytes")
            profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors too
            log.warning("%s is not used: %s", path, error)
            return None
        return profile if profile.subject == subject and profile.format == FORMAT else None

    def write(self, profile: Profile) -> Path:
        """Store `profile` in place of an earlier one, and return its path. Raises OSError if it cannot be
        written."""
        path = self.path(profile.subject)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(suffix=".json", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
        return path


def user_profiles() -> ProfileStore:
    """Return the store of this user's profiles."""
    return ProfileStore(cache_folder() / "profiles")


def this_machine(threads: int) -> ProfiledMachine:
    """Return the machine that this process runs on, with `threads` threads. If kernels are limited as on a
    lesser processor, the name says so, because the model is slower then."""
    lesser = lesser_level()
    name = processor_name() + (f" up to {lesser.path}" if lesser else "")
    return ProfiledMachine(name, os.cpu_count() or 1, threads)


def processor_name() -> str:
    """Return the processor's name reported by Linux; the machine's architecture if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
