"""Choose the implementation of a step's operations on a device: Triton kernels, or plain torch."""

from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple

Implementation = Literal["kernels", "plain"]


class Operations(NamedTuple):
    """The modules of one implementation. All implementations have the same functions with the same
    signatures."""

    layers: ModuleType
    attention: ModuleType
    sampling: ModuleType
    verify: ModuleType
    matrix: ModuleType


def operations(implementation: Implementation) -> Operations:
    """Return an implementation's modules. `kernels` needs Triton, and a GPU or Triton's interpreter."""
    package = f"streamserve.execution.backends.cuda.{implementation}"
    return Operations(*(import_module(f"{package}.{name}") for name in Operations._fields))
