"""The cost of a worker's steps as it travels: measured points of a curve."""

import msgspec


class CostCurve(msgspec.Struct, frozen=True):
    """The measured seconds of a worker's steps. contracts.cost.StepCost extends it: there the fields are
    explained."""

    tokens: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    pair_seconds: float = 0.0
    token_seconds: float = 0.0
    byte_seconds: float = 0.0
