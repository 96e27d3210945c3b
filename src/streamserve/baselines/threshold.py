"""Thresholds on the batch size: chains of draft tokens in small batches, none in large ones."""

from streamserve.speculation.outlook import Outlook
from streamserve.speculation.policies import SpeculationPolicy, stateless
from streamserve.speculation.shapes import PLAIN, TreeShape

DEPTH = 4
SMALL_BATCH, LARGE_BATCH = 8, 32
"""Up to SMALL_BATCH decoding requests, all get draft tokens; from LARGE_BATCH on none does; in between, only
urgent ones."""


def shapes(outlook: Outlook) -> list[TreeShape]:
    """Return a chain or none for each candidate, depending on the number of decoding requests and its
    priority."""
    batch = len(outlook.candidates) + len(outlook.undrafted)
    return [
        TreeShape(DEPTH, 1)
        if batch <= SMALL_BATCH or (batch < LARGE_BATCH and candidate.priority < 0)
        else PLAIN
        for candidate in outlook.candidates
    ]


THRESHOLD = SpeculationPolicy("threshold", stateless(shapes))
