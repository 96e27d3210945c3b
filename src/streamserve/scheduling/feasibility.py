"""Whether a request's latency targets can be met at all, at the load there is now.

The forecast is of the best that could happen, so that only the hopeless are refused: nobody else comes, those
with later deadlines wait, and what is guessed for the request alone is right as often as guesses have been.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from streamserve.speculation.shapes import expected_tokens

RETRY = (1.0, 60.0)
"""The shortest and the longest time, in seconds, after which a refused client is told to come again."""


@dataclass(frozen=True)
class Load:
    """What a worker has to do: `decoding` sequences, and `ahead` prompt tokens that go before the request's.

    `seconds` is the time of a step by rows, a step computing at most `most` rows of prompts. A chain of d
    guesses takes `draft` seconds a guess and is right as far as `cover`^depth says; up to `depth` guesses are
    made, 0 where nobody guesses. An output has `mean_output` tokens.
    """

    decoding: int
    ahead: int
    seconds: Callable[[int], float]
    most: int
    mean_output: float
    draft: float = 0.0
    cover: float = 0.0
    depth: int = 0


def best_ttft(prompt: int, load: Load) -> float:
    """Seconds until a prompt of so many tokens has its first one."""
    rows = load.ahead + prompt
    whole, rest = divmod(rows, load.most)
    return whole * load.seconds(load.decoding + load.most) + (
        load.seconds(load.decoding + rest) if rest else 0.0
    )


def best_tpot(load: Load) -> float:
    """Seconds a token, with as many guesses as help this request most."""
    return min(
        (depth * load.draft + load.seconds(load.decoding + 1 + depth)) / expected_tokens(load.cover, depth)
        for depth in range(load.depth + 1)
    )


def hopeless(
    ttft_ms: float | None, tpot_ms: float | None, prompt: int, load: Load
) -> tuple[Sequence[str], float] | None:
    """What could be met instead of the targets that cannot be, target by target, and in how many seconds to
    ask again; None if there is hope."""
    best = (("ttft_ms", ttft_ms, best_ttft(prompt, load)), ("tpot_ms", tpot_ms, best_tpot(load)))
    missed = [
        f"{name} is {target:g}, and {1000 * seconds:.1f} could be met"
        for name, target, seconds in best
        if target is not None and target < 1000 * seconds
    ]
    if not missed:
        return None
    busy = best_ttft(0, load) + (load.mean_output * load.seconds(load.decoding) if load.decoding else 0.0)
    empty = Load(0, 0, load.seconds, load.most, load.mean_output, load.draft, load.cover, load.depth)
    ever = (ttft_ms or inf) >= 1000 * best_ttft(prompt, empty) and (tpot_ms or inf) >= 1000 * best_tpot(empty)
    return missed, min(max(busy, RETRY[0]), RETRY[1]) if ever else RETRY[1]
