"""The bound of a pattern's steps grows with what makes Python's matching slow."""

import math
import re

import pytest

from streamserve.execution.model.patterns import NAME_LENGTH, matching_steps

NAME = "model.layers.10.self_attn.q_proj"
QUICK = [
    "lm_head",
    r".*lm_head",
    r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
    "^(?!.*lm_head).*$",
    "(?:a|b)?c",
]
SLOW = [".*" * 20, ".?" * 60 + "X", "(.|.)" * 38 + "X", "(a+)+", "(?x)(a +) +", "(.{0,9}){9}"]


@pytest.mark.parametrize("pattern", QUICK)
def test_usual_patterns_are_quick(pattern: str) -> None:
    assert matching_steps(pattern) < 10_000
    re.compile(pattern).match(NAME)


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_could_backtrack_for_long_are_slow(pattern: str) -> None:
    assert matching_steps(pattern) > 1e11


def test_the_bound_counts_quantifiers_and_alternatives() -> None:
    assert matching_steps("abc") == 1
    assert matching_steps("a*b") == matching_steps("a?b") == NAME_LENGTH + 1
    assert matching_steps("(a|b|c)(d|e)") == 6
    assert matching_steps("a+?b") == matching_steps("a+b")
    assert matching_steps(r"a\*\.b") == 1
    assert matching_steps("(ab)*") == math.inf
