"""Arrival times of requests in seconds from the start: all at once, random at a given rate, or from a
trace."""

import math
from pathlib import Path

import numpy as np

from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.workloads import read_lines


def gamma_arrivals(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Return the arrival times of `count` requests, `rate` per second on average; inf means all at once.

    Gaps have a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier (a gap's
    variance is mean² / burstiness), more is more regular. Raises BenchError unless both values are
    positive.
    """
    if not rate > 0:
        raise BenchError(f"the request rate is {rate}; it must be positive, or inf")
    if not (burstiness > 0 and math.isfinite(burstiness)):
        raise BenchError(
            f"the burstiness is {burstiness}; it must be positive: 1 is Poisson, less is burstier"
        )
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1 / (rate * burstiness), count)
    return [float(time) for time in np.cumsum(gaps) - gaps[:1].sum()]


def trace_arrivals(path: Path, count: int) -> list[float]:
    """Return the first `count` times of a trace, shifted so that the first is 0.

    The trace has one number per line, or objects with "timestamp", in seconds. Raises BenchError if there are
    too few times, or if one is not a number or is earlier than the line before.
    """
    times: list[float] = []
    for where, entry in read_lines(path):
        time = entry.get("timestamp") if isinstance(entry, dict) else entry
        if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
            raise BenchError(f'{where} must be a number of seconds, or an object with "timestamp"')
        if times and time < times[-1]:
            raise BenchError(f"{where}: {time} is before the line above; sort the trace")
        times.append(time)
        if len(times) == count:
            return [time - times[0] for time in times]
    raise BenchError(f"{path} has {len(times)} times: reduce --num-prompts to at most {len(times)}")
