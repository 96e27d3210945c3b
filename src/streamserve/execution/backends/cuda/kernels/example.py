"""Kernels with the argument types and constants of real launches, to be compiled without a GPU."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelExample:
    """A kernel and an example of its launch. `signature` maps the kernel's arguments to Triton types
    ("*bf16", "i32", "fp32"), `constants` its compile-time arguments to values."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = field(default=())
    """Integer arguments that are multiples of 16."""
    copied: int = 16
    """Alignment in bytes of the rows that are copied to shared memory."""
    programs: int = 1
    """Number of programs that must fit on a multiprocessor at once."""
