"""The operations of a step on a device: Triton kernels, or the same functions in plain torch."""

from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple

Implementation = Literal["kernels", "plain"]


class Operations(NamedTuple):
    """The modules of one implementation. Both have the same functions with the same signatures."""

    layers: ModuleType
    attention: ModuleType
    sampling: ModuleType
    verify: ModuleType
    matrix: ModuleType


def operations(implementation: Implementation) -> Operations:
    """Return an implementation's modules. `kernels` needs Triton, and a GPU or Triton's interpreter."""
    package = f"streamserve.execution.cuda.{implementation}"
    return Operations(*(import_module(f"{package}.{name}") for name in Operations._fields))
