"""The order of a weight's inputs where a tensor says which group each is in (`g_idx`): groups need not follow
the inputs, since some methods group inputs by how active they are."""

import torch
from torch import Tensor

from streamserve.execution.checkpoint import Checkpoint, Header

NO_GROUP = -1
"""What compressed-tensors writes for inputs that are in the order of their groups."""


def index_header(columns: int, optional: bool) -> Header:
    """Return the header of a tensor that has the group of each input."""
    return Header((columns,), ("I32", "I64"), optional)


def input_order(checkpoint: Checkpoint, name: str, columns: int, group: int | None) -> Tensor | None:
    """Return the inputs [columns] (int64) group by group, those of a group in ascending order; None where
    groups follow the inputs. Raises CheckpointError unless all groups have `group` inputs, the last perhaps
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
