"""Fixed trees: one shape for every request, whatever it costs."""

from streamserve.speculation.policies import MAX_DEPTH, SpeculationPolicy, stateless
from streamserve.speculation.shapes import TreeShape

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
    """Return the policy that requests `shape` for every request."""
    return SpeculationPolicy(name, stateless(lambda outlook: [shape] * len(outlook.candidates)))
