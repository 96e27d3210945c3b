"""Sums and joins over the ranks of a tensor-parallel model, the same bits on every rank and for any number of
rows: parts are added in the order of the ranks."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others: while a model is loaded, and in a step."""


@dataclass(frozen=True)
class Ranks:
    """One rank of `degree`, with the `process_group` (gloo on CPUs, NCCL on GPUs) of all."""

    rank: int
    degree: int
    process_group: Any

    @classmethod
    def connect(cls, rank: int, degree: int, store: Path, device: torch.device) -> "Ranks":
        """Meet the other ranks by the file `store`, in a folder of their own. They talk on this host only."""
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
        """Return when all ranks have come here; the store is not used any more."""
        self.add(torch.zeros(1, device=device))

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape, in order."""
        parts = [torch.empty_like(x) for _ in range(self.degree)]
        self.process_group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, added in float32, in the dtype of `x`."""
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
