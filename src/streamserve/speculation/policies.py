"""The speculation policies by name: what each requests from drafters, and what it verifies."""

from dataclasses import dataclass

from streamserve.speculation import adaserve, goodput, specustream
from streamserve.speculation.outlook import DraftedStep, Outlook
from streamserve.speculation.shapes import PLAIN, SPECINFER, Shape
from streamserve.speculation.specustream import Flow

MAX_DEPTH = 20
"""The greatest depth and the greatest width of a tree that can be requested."""

BUDGETED = ("adaserve", "adaserve-as-published", "equal-greedy", "global-greedy")
NAMES = (
    "goodput", "off", *BUDGETED, "specustream", "specustream-as-published", "specustream-equations",
    "threshold", "specinfer-tree",
)  # fmt: skip
THRESHOLD_DEPTH = 4
SMALL_BATCH, LARGE_BATCH = 8, 32
"""`threshold` drafts in batches of up to SMALL_BATCH, and not at all from LARGE_BATCH on; between them only
for urgent requests."""


@dataclass(frozen=True)
class SpeculationPolicy:
    """A policy by name; `fixed` always requests `shape`, the others compute theirs."""

    kind: str
    shape: Shape = PLAIN

    @property
    def calibrated(self) -> bool:
        """Whether draft tokens are judged by calibrated acceptance instead of the drafter's own scores."""
        return self.kind != "adaserve-as-published"


def parse_policy(text: str) -> SpeculationPolicy:
    """Return the policy for one of NAMES, `fixed:DEPTH` or `fixed-tree:WIDTHxDEPTH`. Raises ValueError for
    anything else."""
    kind, _, argument = text.partition(":")
    if text in NAMES:
        return SpeculationPolicy(text, SPECINFER if text == "specinfer-tree" else PLAIN)
    width, _, depth = argument.rpartition("x")
    if (kind == "fixed" and not width) or (kind == "fixed-tree" and width):
        numbers = (width or "1", depth)
        if all(number.isascii() and number.isdigit() and 1 <= int(number) <= MAX_DEPTH for number in numbers):
            return SpeculationPolicy("fixed", Shape(int(depth), int(width or 1)))
    raise ValueError(
        f"unknown speculation policy {text!r}: choose one of {', '.join(NAMES)}, fixed:DEPTH, "
        f"fixed-tree:WIDTHxDEPTH (each at most {MAX_DEPTH})"
    )


def shapes(policy: SpeculationPolicy, outlook: Outlook, flow: Flow) -> tuple[list[Shape], Flow]:
    """Return what to draft for each candidate, and SpecuStream's new state; other policies return it
    unchanged."""
    count = len(outlook.candidates)
    match policy.kind:
        case "off":
            return [PLAIN] * count, flow
        case "goodput":
            return goodput.shapes(outlook), flow
        case "threshold":
            return _threshold(outlook), flow
        case "specustream":
            return specustream.corrected(outlook, flow)
        case "specustream-as-published":
            return specustream.as_published(outlook, flow)
        case "specustream-equations":
            return specustream.as_published(outlook, flow, equations=True)
        case kind if kind in BUDGETED:
            decoding = count + len(outlook.undrafted)
            return [adaserve.beam(adaserve.token_budget(outlook.step), max(decoding, 1))] * count, flow
        case _:
            return [policy.shape] * count, flow


def select(policy: SpeculationPolicy, drafted: DraftedStep) -> list[list[int]]:
    """Return which nodes of each tree to verify, ascending and with the root."""
    if policy.kind == "goodput":
        return goodput.select(drafted)
    if policy.kind not in BUDGETED:
        return [list(range(len(tree))) for tree in drafted.trees]
    budget = adaserve.token_budget(drafted.step)
    as_published = policy.kind == "adaserve-as-published"
    left = min(budget - drafted.decoding, drafted.budget - as_published)
    match policy.kind:
        case "equal-greedy":
            return adaserve.equal_greedy(drafted.trees, left)
        case "global-greedy":
            return adaserve.global_greedy(drafted.trees, left)
    requirements = adaserve.required_tokens(drafted.requirements, drafted.step(budget))
    return adaserve.customized(drafted.trees, requirements, left, as_published)


def _threshold(outlook: Outlook) -> list[Shape]:
    batch = len(outlook.candidates) + len(outlook.undrafted)
    return [
        Shape(THRESHOLD_DEPTH, 1)
        if batch <= SMALL_BATCH or (batch < LARGE_BATCH and candidate.priority < 0)
        else PLAIN
        for candidate in outlook.candidates
    ]
