"""A cost curve of a simulated worker."""

from streamserve.protocol.cost_curve import CostCurve

CURVE = CostCurve(
    tokens=(1.0, 64.0), kv_bytes=(0.0, 1e6), seconds=((0.01, 0.02), (0.05, 0.06)), pair_seconds=0.0,
    token_seconds=1e-3, byte_seconds=1e-8,
)  # fmt: skip
