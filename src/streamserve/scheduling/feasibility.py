"""Whether a request's latency targets can be met at the present load.

The forecast is the best case, so that only infeasible requests are refused. No other request arrives;
requests with later deadlines wait; only this request has draft tokens, and they are accepted as often as
before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from streamserve.speculation.outlook import Means
from streamserve.speculation.shapes import expected_tokens

RETRY = (1.0, 60.0)
"""The shortest and the longest `Retry-After`, in seconds, that a refused client is given."""


@dataclass(frozen=True)
class Load:
    """A worker's load when a request arrives.

    * `decoding`: decoding sequences.
    * `queued_tokens`: prompt tokens that are computed before the request's own.
    * `max_prompt_tokens`: maximum prompt tokens of a step.
    * `mean_output`: mean tokens of an output.
    * `means`: costs of steps and acceptance of draft tokens.
    """

    decoding: int
    queued_tokens: int
    max_prompt_tokens: int
    mean_output: float
    means: Means


def best_ttft(prompt: int, load: Load) -> float:
    """Return the least seconds until a prompt of `prompt` tokens has its first output token."""
    full_steps, remainder = divmod(load.queued_tokens + prompt, load.max_prompt_tokens)
    step = load.means.step
    return full_steps * step(load.decoding + load.max_prompt_tokens) + (
        step(load.decoding + remainder) if remainder else 0.0
    )


def best_tpot(load: Load) -> float:
    """Return the least seconds per output token, over all lengths of the request's draft chain."""
    means, draft_seconds = load.means, load.means.draft(1)
    return min(
        (depth * draft_seconds + means.step(load.decoding + 1 + depth))
        / expected_tokens(means.acceptance, depth)
        for depth in range(means.depth + 1)
    )


def infeasible(
    ttft_ms: float | None, tpot_ms: float | None, prompt: int, load: Load
) -> tuple[Sequence[str], float] | None:
    """Return None if the targets are feasible. Otherwise return a text for each infeasible target, which
    names the least milliseconds that could be met, and the seconds after which the client should retry."""
    best = (("ttft_ms", ttft_ms, best_ttft(prompt, load)), ("tpot_ms", tpot_ms, best_tpot(load)))
    missed = [
        f"{name} is {target:g}, and {1000 * seconds:.1f} could be met"
        for name, target, seconds in best
        if target is not None and target < 1000 * seconds
    ]
    if not missed:
        return None
    # Retry when the queue is computed and the decoding sequences have generated an output of mean length. A
    # target that an idle worker would miss, too, gets the longest wait.
    busy = best_ttft(0, load) + (load.mean_output * load.means.step(load.decoding) if load.decoding else 0.0)
    empty = replace(load, decoding=0, queued_tokens=0)
    ever = (ttft_ms or inf) >= 1000 * best_ttft(prompt, empty) and (tpot_ms or inf) >= 1000 * best_tpot(empty)
    return missed, min(max(busy, RETRY[0]), RETRY[1]) if ever else RETRY[1]
