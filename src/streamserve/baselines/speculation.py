"""The speculation policies by name: `goodput`, `off`, and baselines for comparison."""

from streamserve.baselines import adaserve, specustream
from streamserve.baselines.fixed import SPECINFER, fixed, fixed_shape
from streamserve.baselines.threshold import THRESHOLD
from streamserve.speculation.policies import GOODPUT, MAX_DEPTH, OFF, SpeculationPolicy

POLICIES: dict[str, SpeculationPolicy] = {
    policy.name: policy
    for policy in (
        GOODPUT,
        OFF,
        *adaserve.POLICIES,
        *specustream.POLICIES,
        THRESHOLD,
        fixed("specinfer-tree", SPECINFER),
    )
}
NAMES = tuple(POLICIES)


def parse_policy(text: str) -> SpeculationPolicy:
    """Return the policy for one of NAMES, `fixed:DEPTH` or `fixed-tree:WIDTHxDEPTH`. Raises ValueError for
    anything else."""
    if policy := POLICIES.get(text):
        return policy
    if shape := fixed_shape(text):
        return fixed(text, shape)
    raise ValueError(
        f"unknown speculation policy {text!r}: choose one of {', '.join(NAMES)}, fixed:DEPTH, "
        f"fixed-tree:WIDTHxDEPTH (each at most {MAX_DEPTH})"
    )
