"""The speculation policies by name: `goodput`, `off`, and baselines for comparison."""

from streamserve.baselines import adaserve, specustream
from streamserve.speculation.outlook import Outlook
from streamserve.speculation.policies import GOODPUT, MAX_DEPTH, OFF, SpeculationPolicy, stateless
from streamserve.speculation.shapes import PLAIN, TreeShape

SPECINFER = TreeShape(8, 3, (1, 1, 3, 1, 1, 1, 1, 1))
"""SpecInfer's fixed tree, a baseline of AdaServe."""


def fixed_shape(name: str) -> TreeShape | None:
    """Return the shape of the policy `fixed:DEPTH`, `fixed-tree:WIDTHxDEPTH` or `specinfer-tree`. None for
    other names, and for numbers outside 1 to MAX_DEPTH."""
    if name == "specinfer-tree":
        return SPECINFER
    kind, _, argument = name.partition(":")
    width, _, depth = argument.rpartition("x")
    if (kind == "fixed" and not width) or (kind == "fixed-tree" and width):
        numbers = (width or "1", depth)
        if all(number.isascii() and number.isdigit() and 1 <= int(number) <= MAX_DEPTH for number in numbers):
            return TreeShape(int(depth), int(width or 1))
    return None


def fixed(name: str, shape: TreeShape) -> SpeculationPolicy:
    """Return the policy that requests `shape` for every request, whatever it costs."""
    return SpeculationPolicy(name, stateless(lambda outlook: [shape] * len(outlook.candidates)))


DEPTH = 4
SMALL_BATCH, LARGE_BATCH = 8, 32
"""Up to SMALL_BATCH decoding requests, all get draft tokens; from LARGE_BATCH on none does; in between, only
urgent ones."""


def threshold_shapes(outlook: Outlook) -> list[TreeShape]:
    """Return a chain or none for each candidate, depending on the number of decoding requests and its
    priority."""
    batch = len(outlook.candidates) + len(outlook.undrafted)
    return [
        TreeShape(DEPTH, 1)
        if batch <= SMALL_BATCH or (batch < LARGE_BATCH and candidate.priority < 0)
        else PLAIN
        for candidate in outlook.candidates
    ]


THRESHOLD = SpeculationPolicy("threshold", stateless(threshold_shapes))
"""Thresholds on the batch size: chains of draft tokens in small batches, none in large ones."""

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
