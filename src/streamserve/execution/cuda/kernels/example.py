"""A kernel with the argument types and constants of a real launch, to be compiled without a GPU."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelExample:
    """`signature` maps the kernel's arguments to Triton types ("*bf16", "i32", "fp32"), `constants` its
    compile-time arguments to values."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are multiples of 16."""
    copied: int = 16
    """Bytes to which the rows are aligned that are copied to shared memory."""
    programs: int = 1
    """Programs that are to run on a multiprocessor at once."""
