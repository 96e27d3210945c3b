"""Choose the device that a model runs on, and measure its free memory."""

import torch

from streamserve.execution.compute.memory import HostShare
from streamserve.protocol.errors import CheckpointError
from streamserve.system.available_memory import available_bytes

NOT_YET_RUN = "tensor parallelism has not yet run on GPUs: it was tested on CPUs"
"""The notice to clients of a model that is divided among GPUs."""


def choose_device(name: str) -> torch.device:
    """Return the device for a value of `--device`: cpu, cuda, cuda:INDEX, or auto (a GPU if there is one).
    Raises CheckpointError for a device that does not exist."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", 0) if count else torch.device("cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or (not index and name == "cuda")):
        raise CheckpointError(f"--device {name}: use cpu, cuda, cuda:INDEX, or auto")
    if int(index or 0) >= count:
        reason = f"{count} found" if torch.version.cuda else "this PyTorch was built without CUDA"
        raise CheckpointError(f"--device {name}: there is no such GPU: {reason}")
    return torch.device("cuda", int(index or 0))


def divide_devices(name: str, share: HostShare) -> tuple[torch.device, float]:
    """Return the device of a worker, and the fraction of the device's memory that the worker may use. Without
    an INDEX the machine's workers are divided among all GPUs in turn. Raises CheckpointError as
    `choose_device` does."""
    device = choose_device(name)
    if device.type == "cpu" or ":" in name:
        return device, share.memory
    return _in_turn(share, torch.cuda.device_count())


def _in_turn(share: HostShare, count: int) -> tuple[torch.device, float]:
    index = share.number % share.workers % count
    return torch.device("cuda", index), 1 / len(range(index, share.workers, count))


def notice(device: torch.device, degree: int = 1) -> str:
    """Return the notice to clients of a model on `degree` devices; empty if there is none."""
    return NOT_YET_RUN if device.type == "cuda" and degree > 1 else ""


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    return available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def budget_bytes(device: torch.device, share: float) -> int:
    """Return the free bytes of a device that a worker with this `share` may use. On a shared GPU it is a
    fixed fraction of the total memory: workers start at the same time, so the free memory depends on
    chance."""
    if device.type == "cpu" or share == 1:
        return int(free_bytes(device) * share)
    free, total = torch.cuda.mem_get_info(device)
    return min(free, int(total * share))
