"""A speculation policy: what it requests from drafters, and what it verifies.

`goodput` is the product's own. Published policies to compare it with are in streamserve.baselines, which has
all policies by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamserve.speculation import goodput
from streamserve.speculation.outlook import DraftedStep, Outlook, Selection
from streamserve.speculation.shapes import PLAIN, Shape

MAX_DEPTH = 20
"""The greatest depth and the greatest width of a tree that can be requested."""

ChooseShapes = Callable[[Outlook, Any], tuple[list[Shape], Any]]


def whole_trees(drafted: DraftedStep) -> Selection:
    """Return all nodes of each tree."""
    return [list(range(len(tree))) for tree in drafted.trees]


def stateless(shapes: Callable[[Outlook], list[Shape]]) -> ChooseShapes:
    """Return `shapes` in the form of a policy that keeps no state between steps."""
    return lambda outlook, state: (shapes(outlook), state)


@dataclass(frozen=True)
class SpeculationPolicy:
    """A policy. It decides by what it is given; its state between steps is kept by the controller.

    * `shapes(outlook, state)` returns what to draft for each candidate, and the state for the next step. It
      is `state` at first.
    * `select(drafted)` returns which nodes of each tree to verify, ascending and with the root.
    * `calibrated`: draft tokens are judged by calibrated acceptance instead of the drafter's own scores.
    * `weighs_costs`: it drafts only where that pays by the costs as learned. So they are kept current by
      trials, and a draft model reads a text only if that pays too.
    * `drafts`: False if it never requests a draft token.
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
