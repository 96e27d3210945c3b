"""Choose the path of the kernels: the instructions with which this processor multiplies fastest.

A processor may have an instruction and be slow at it: some run the bf16 dot product at half the rate of
float32. The rates are measured once and stored with the compiled kernels, so that all workers make the same
choice at every start.
"""

import contextlib
import ctypes
import functools
import logging
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path as FilePath

import msgspec
import torch

from streamserve.execution.backends.native.build import LOCK, locked
from streamserve.execution.backends.native.library import Path, ThreadPool
from streamserve.execution.backends.native.packaged import rates_file

log = logging.getLogger(__name__)

ATTEMPTS, SECONDS, ROUNDS = 20, 0.001, 10_000
"""Number of measurements of a rate, minimum seconds of each, and loop rounds of the first one. The best
measurement counts, because disturbances only take time."""

ATTAINED = {Path.AMX: 0.75, Path.AVX512_BF16: 0.95, Path.AVX512: 0.85, Path.AVX2: 0.85}
"""The share of the multipliers' rate that a path's kernel reaches in products of 512 rows with bf16 weights,
measured by benchmarks/kernels/widths.py."""

MARGIN = 0.9
"""A newer path is taken if it has at least this share of the fastest path's speed, because the integer
kernels need its instructions."""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured operations a second of one thread with bf16 weights, by the name of the path."""

    by_path: dict[str, float]


def name_of(path: Path) -> str:
    """Return a path's name in `--kernel-path`."""
    return path.name.lower()


def numerics_of(path: Path) -> str:
    """Return the name of the class of bits that a path computes. AMX adds bf16 products in another order, and
    portable code rounds twice where the other paths fuse a product with a sum."""
    return f"native {name_of(path)}" if path in (Path.PORTABLE, Path.AMX) else "native"


def multiplier_rate(pool: ThreadPool, path: Path, bits: int = 16) -> float:
    """Return the operations a second of the pool's threads with numbers in registers, for weights of `bits`
    bits (8: in the integer kernels); 0 if the path has no instructions for them."""
    rounds, seconds, rates = ROUNDS, 0.0, list[float]()
    while seconds < SECONDS or len(rates) < ATTEMPTS:
        started = time.perf_counter()
        operations = pool.library.ss_multiply_registers(pool.handle, path, bits, rounds)
        seconds = time.perf_counter() - started
        if not operations:
            return 0.0
        if seconds < SECONDS:
            rounds *= 2
        else:
            rates.append(operations / seconds)
    return max(rates)


def choose(rates: Mapping[Path, float]) -> Path:
    """Return the path that is expected to be the fastest with bf16 weights, by the multipliers' rates. Among
    paths of about equal speed (MARGIN) the newest is returned."""
    speeds = {path: rate * ATTAINED.get(path, 0.0) for path, rate in rates.items()}
    fastest = max(speeds.values())
    return max(path for path, speed in speeds.items() if speed >= MARGIN * fastest)


@functools.cache
def best_path(library: ctypes.CDLL, numerics: str = "") -> Path | None:
    """Return the best path for this processor, by stored rates or by rates measured now. With `numerics`,
    only paths of that class of bits are considered; None if there is none."""
    pool = ThreadPool(library, 1)
    supported = [path for path in Path if pool.supports(path, torch.bfloat16)]
    rates = _ensure_rates(library, pool, supported)
    wanted = [path for path in supported if numerics in ("", numerics_of(path))]
    return choose({path: rates.get(name_of(path), 0.0) for path in wanted}) if wanted else None


def _ensure_rates(library: ctypes.CDLL, pool: ThreadPool, paths: list[Path]) -> Mapping[str, float]:
    """Return the stored rates; if there are none, measure the rates of `paths` and store them."""
    try:
        file = rates_file(FilePath(library._name))
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        rates = _read(file)  # a file is replaced as a whole, so reading needs no lock
        if rates is None:
            with locked(file.parent / LOCK):
                rates = _read(file)
                if rates is None:
                    rates = Rates({name_of(path): multiplier_rate(pool, path) for path in paths})
                    _write(file, rates)
    except OSError as error:
        log.warning("the rates of the kernels' instructions cannot be stored: %s", error)
        return {name_of(path): multiplier_rate(pool, path) for path in paths}
    return rates.by_path


def stored_rates(library: FilePath) -> Mapping[str, float] | None:
    """Return the stored rates of the library at a file path, by the names of kernel paths; None if there are
    none."""
    try:
        rates = _read(rates_file(library))
    except OSError:
        return None
    return rates.by_path if rates else None


def _read(file: FilePath) -> Rates | None:
    """Return the stored rates; None if there are no valid ones."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        if stat.S_ISREG(file.stat().st_mode):  # reading a pipe would not end
            return msgspec.json.decode(file.read_bytes(), type=Rates)
    return None


def _write(file: FilePath, rates: Rates) -> None:
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as to:
            to.write(msgspec.json.format(msgspec.json.encode(rates)) + b"\n")
        os.replace(name, file)
    finally:
        FilePath(name).unlink(missing_ok=True)
