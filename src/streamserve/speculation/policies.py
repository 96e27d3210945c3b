"""Speculation policies: which draft trees to request, and which of their nodes to verify.

The default is `goodput`. streamserve.baselines has published policies to compare it with, and the table of
all policies by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamserve.speculation import goodput
from streamserve.speculation.outlook import DraftedStep, Outlook, Selection
from streamserve.speculation.shapes import PLAIN, TreeShape

MAX_DEPTH = 20
"""Maximum depth, and maximum width, of a tree that can be requested."""

ChooseShapes = Callable[[Outlook, Any], tuple[list[TreeShape], Any]]
"""Takes the step and the policy's state. Returns a shape for each candidate, and the next state."""


def whole_trees(drafted: DraftedStep) -> Selection:
    """Return all nodes of each tree."""
    return [list(range(len(tree))) for tree in drafted.trees]


def stateless(shapes: Callable[[Outlook], list[TreeShape]]) -> ChooseShapes:
    """Return `shapes` as a ChooseShapes function that ignores and keeps the state."""
    return lambda outlook, state: (shapes(outlook), state)


@dataclass(frozen=True)
class SpeculationPolicy:
    """A speculation policy of pure functions. The controller keeps its state between steps.

    * `shapes(outlook, state)` returns the shape to draft for each candidate, and the state for the next step.
      The field `state` is the state before the first step.
    * `select(drafted)` returns the nodes of each tree to verify, ascending and with the root.
    * `calibrated`: draft tokens are judged by calibrated acceptance instead of the drafter's own scores.
    * `weighs_costs`: the policy drafts only if that is faster by the learned costs. So trials keep these
      costs current, and a draft model catches up with a request only if that is expected to pay, too.
    * `drafts`: False if the policy never requests a draft token.
    """

    name: str
    shapes: ChooseShapes
    select: Callable[[DraftedStep], Selection] = whole_trees
    state: Any = None
    calibrated: bool = True
    weighs_costs: bool = False
    drafts: bool = True


GOODPUT = SpeculationPolicy("goodput", stateless(goodput.shapes), goodput.select, weighs_costs=True)
OFF = SpeculationPolicy("off", stateless(lambda outlook: [PLAIN] * len(outlook.candidates)), drafts=False)
