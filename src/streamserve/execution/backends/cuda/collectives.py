"""Sums and joins over the ranks of a tensor-parallel model. Parts are added in the order of the ranks, so
that a row's sum has the same bits on every rank and with any number of rows."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

TIMEOUT = timedelta(minutes=5)
"""Maximum time that a rank waits for the others, at loading and in a step."""


@dataclass(frozen=True)
class Ranks:
    """One rank of `degree`, with the `process_group` of all ranks (gloo on CPUs, NCCL on GPUs)."""

    rank: int
    degree: int
    process_group: Any

    @classmethod
    def connect(cls, rank: int, degree: int, store: Path, device: torch.device) -> "Ranks":
        """Connect to the other ranks, which are on the same host, by the file `store`. The ranks must be the
        only users of its folder."""
        backends: Any = dist
        shared = backends.PrefixStore("ranks", backends.FileStore(str(store), degree))
        if device.type == "cuda":
            nccl = backends.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = TIMEOUT
            return cls(rank, degree, nccl(shared, rank, degree, options))
        gloo = backends.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return cls(rank, degree, gloo(shared, rank, degree, options))

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks have called this. After that, the store is not needed any more."""
        self.add(torch.zeros(1, device=device))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in order. They must have one shape."""
        parts = [torch.empty_like(x) for _ in range(self.degree)]
        self.process_group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors in the dtype of `x`. It is computed in float32."""
        first, *others = self.gather(x)
        total = first.float()
        for part in others:
            total = total + part.float()
        return total.to(x.dtype)

    def join(self, x: Tensor) -> Tensor:
        """Return all ranks' tensors joined along the last dimension."""
        return torch.cat(self.gather(x), -1)

    def share(self, x: Tensor) -> None:
        """Copy rank 0's tensor to `x` on all ranks."""
        self.process_group.broadcast(x, 0).wait()
