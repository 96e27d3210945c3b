"""The order of a weight's inputs, if a tensor (`g_idx`) has the group of each input. The inputs of a group
need not be adjacent, because some methods group inputs by their activity."""

import torch
from torch import Tensor

from streamserve.execution.formats.checkpoint import Checkpoint, ExpectedTensor

NO_GROUP = -1
"""The group that compressed-tensors writes for all inputs if groups follow the inputs."""


def index_header(columns: int, optional: bool) -> ExpectedTensor:
    """Return the required header of a tensor with the group of each input."""
    return ExpectedTensor((columns,), ("I32", "I64"), optional)


def input_order(checkpoint: Checkpoint, name: str, columns: int, group: int | None) -> Tensor | None:
    """Return the inputs [columns] (int64) in the order of their groups, ascending within a group; None if
    groups follow the inputs. Raises CheckpointError unless all groups have `group` inputs; the last may have
    fewer."""
    if name not in checkpoint:
        return None
    index = checkpoint.integers(name).long()
    in_order = torch.arange(columns) // (group or columns)
    if torch.equal(index, in_order) or bool((index == NO_GROUP).all()):
        return None
    sorted_index, order = index.sort(stable=True)
    if not torch.equal(sorted_index, in_order):
        checkpoint.refuse(name, f"does not divide the inputs into groups of {group or columns}")
    return order
