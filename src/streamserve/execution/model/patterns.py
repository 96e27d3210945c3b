"""The cost of matching a regular expression of a checkpoint or an adapter with a module's name.

The bound is known before anything is matched: Python's matching backtracks without a limit.
"""

import math
import re

NAME_LENGTH = 64
"""Upper bound of the length of a module's name."""


def matching_steps(pattern: str) -> float:
    """Return an upper bound of the steps of matching a pattern with a name: the number of ways to divide the
    name among the quantifiers, times the number of choices of alternatives. Infinite if a group is repeated,
    and for patterns with flags, which change the meaning of characters."""
    plain = re.sub(r"\\.", "a", pattern)
    if re.search(r"\)[*+{]|\(\?[aiLmsux-]", plain):
        return math.inf
    quantifiers = len(re.findall(r"[*+{]|(?<![(*+?}])\?", plain))
    return math.comb(NAME_LENGTH + quantifiers, quantifiers) * _alternatives(plain)


def _alternatives(pattern: str) -> int:
    """Return the product of the numbers of alternatives of all groups."""
    ways, groups = 1, [1]
    for character in pattern:
        if character == "(":
            groups.append(1)
        elif character == "|":
            groups[-1] += 1
        elif character == ")" and len(groups) > 1:
            ways *= groups.pop()
    return ways * math.prod(groups)
