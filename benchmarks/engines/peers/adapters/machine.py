"""Measure the hardware floor: the current speed of memory and matrix units, by the best available code."""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

SIZE = 400 << 20
ROWS = 512


def environment(cores: Sequence[int]) -> dict[str, str]:
    """Return no variables: the defaults apply."""
    return {}


class Engine:
    """Reads memory, and multiplies by a matrix of the model with our kernel and with oneDNN."""

    version = ""
    precision = ""

    def __init__(
        self, checkpoint: str, converted: str, threads: int, kv_bytes: int, options: dict[str, Any]
    ) -> None:
        import torch

        from streamserve.execution.backends.native.library import ThreadPool, kernels
        from streamserve.execution.backends.native.linear import NativeLinear
        from streamserve.execution.formats.quantization import HEAD_FORMAT as INT8
        from streamserve.execution.formats.quantization import quantize
        from streamserve.execution.model.linear import Linear

        library = kernels()
        if library is None:
            raise RuntimeError("the floor is measured with our kernels, and they cannot be compiled here")
        torch.set_num_threads(threads)
        pool = ThreadPool(library, threads)
        memory = pool.memory(SIZE)
        memory.fill_(1)
        weight = torch.randn(options["out"], options["in"]).bfloat16()
        x = torch.randn(ROWS, options["in"]).bfloat16()
        maps = NativeLinear(pool, weight), Linear(weight)
        rounded = NativeLinear(pool, quantize(weight, INT8))
        self._read = lambda: library.ss_read(pool.handle, ctypes.c_void_p(memory.data_ptr()), SIZE // 8)
        self._multiply = [lambda map=map: map(x) for map in maps]
        self._multiply_int8 = lambda: rounded(x)
        self._flops = 2 * ROWS * weight.numel()

    def generate(self, prompts: list[list[int]], max_tokens: int, work: dict[str, Any]) -> list[list[int]]:
        """Return bytes a second, FLOPs a second in bf16 and in int8, as the only answer."""
        bandwidth = SIZE / _fastest(self._read, 4)
        rate = self._flops / min(_fastest(multiply, 12) for multiply in self._multiply)
        rate_int8 = self._flops / _fastest(self._multiply_int8, 12)
        return [[int(bandwidth), int(rate), int(rate_int8)]]

    def close(self) -> None:
        """Do nothing: no resources are open."""


def _fastest(call: Callable[[], Any], times: int) -> float:
    """Return the seconds of the fastest call."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
