"""A worker's KV as its transport sees it: the rows of all KV cache groups. A row is one layer of one group.

    memory   [draft model's layers][target's layers], each [block][bytes]: the same order in every worker

Rows that the next step writes become ready one by one, in this order: a draft model reads a prompt before the
target does. On a GPU all rows become ready when the host has the step's results.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamserve.contracts.transport import TransferError
from streamserve.protocol.transfers import CacheAddress

Written = npt.NDArray[np.int64]
"""One number: the layers that the target has written in all its steps so far."""

LAYER_SECONDS = 0.0003
"""Polling interval in seconds while waiting for a layer."""


def check_fits(to: CacheAddress, fingerprint: str, block_bytes: int) -> None:
    """Raise TransferError unless a cache has this fingerprint and blocks of `block_bytes` bytes."""
    if to.fingerprint != fingerprint:
        raise TransferError(
            f"KV of {fingerprint} does not fit a cache of {to.fingerprint}: "
            "weights, precision, block size or layout differ"
        )
    if to.size != block_bytes * to.num_blocks:
        raise TransferError(
            f"the cache at {to.path} has {to.size} bytes, which is not {to.num_blocks} blocks"
        )


class Pools:
    """The pools [layer, block, bytes] of all KV cache groups, the target's last, in host memory or on a GPU.

    In the target's steps `written` grows by one with each layer.
    """

    def __init__(self, pools: Sequence[Tensor], written: Written | None = None) -> None:
        self.pools = pools
        self.rows = [layer for pool in pools for layer in pool]
        self._written = np.zeros(1, np.int64) if written is None else written
        self._layers = len(pools[-1])
        device = pools[-1].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def num_blocks(self) -> int:
        return len(self.rows[0])

    @property
    def block_bytes(self) -> int:
        """The number of bytes of a block in all rows."""
        return sum(row.shape[1] for row in self.rows)

    def before_step(self) -> int:
        """Return the number of layers written so far. For blocks that the next step fills, `ready` needs this
        number as `since`."""
        return int(self._written[0])

    def ready(self, since: int | None) -> int:
        """Return how many rows, from the first on, the step that began at `since` has written.

        Without `since`, return the number of all rows: the blocks were complete before.
        """
        if since is None:
            return len(self.rows)
        done = min(max(int(self._written[0]) - since, 0), self._layers)
        return len(self.rows) - self._layers + done

    def read(self, row: int, blocks: Tensor) -> Tensor:
        """Return these blocks of a ready row in host memory, [block, bytes].

        From a GPU, they are copied after all kernels launched so far, on a stream that steps do not wait
        for.
        """
        source = self.rows[row]
        if self._stream is None:
            own: Tensor = source.index_select(0, blocks)
            return own
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(source.device))
            gathered = source.index_select(0, blocks.to(source.device))
            host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
        self._stream.synchronize()
        return host

    def of(self, memory: Tensor, num_blocks: int) -> list[Tensor]:
        """Return the rows of another worker's memory, which has `num_blocks` blocks."""
        rows, offset = [], 0
        for own in self.rows:
            size = num_blocks * own.shape[1]
            rows.append(memory[offset : offset + size].view(num_blocks, own.shape[1]))
            offset += size
        return rows
