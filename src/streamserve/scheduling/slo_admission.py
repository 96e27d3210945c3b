"""SLO admission: which prompts may begin, so that decoding requests with a latency target can stay on it.

A computed prompt becomes a decoding request, and makes every step of the others longer. Where their targets
and its own could not all be met from then on, it waits: so some requests meet their targets where otherwise
none would. A request that already holds memory always continues.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from streamserve.scheduling.ordering import MAX_WAIT
from streamserve.scheduling.request import RequestView
from streamserve.speculation.outlook import Means
from streamserve.speculation.shapes import expected_tokens

MAX_QUERY_TOKENS = 4096
"""Most query tokens of a step that are considered."""
HEADROOM = 0.9
"""Share of the draft tokens' expected accepted tokens that is counted on: acceptance comes in streaks."""
GRACE = MAX_WAIT / 10
"""Seconds that a prompt waits at least for other requests' targets, before it is admitted at their cost."""


def needs_admission(view: RequestView) -> bool:
    """Whether a prompt has not begun yet and will decode on this worker once it is computed."""
    return view.decodes_here and view.complete and not (view.running or view.outputs)


def has_begun(view: RequestView) -> bool:
    """Whether a prompt that was admitted earlier continues, and will decode on this worker."""
    return view.decodes_here and view.complete and (view.running or view.outputs > 0)


def aging_in(prompts: Sequence[RequestView], now: float) -> int | None:
    """Return the index of the first of `prompts` that is to be aged in: it has reached the maximum wait for
    other requests' targets, and has no deadline that it can still meet."""
    for i, prompt in enumerate(prompts):
        timely = prompt.deadline is not None and now <= prompt.deadline
        if not timely and now - prompt.arrival > GRACE:
            return i
    return None


def discounted_tokens(acceptance: float, depth: int) -> float:
    """Return the tokens that a step yields for one request with a chain of `depth` draft tokens, each
    accepted with probability `acceptance`."""
    return 1.0 + HEADROOM * (expected_tokens(acceptance, depth) - 1.0)


def sustainable(
    counts: Mapping[float | None, int], means: Means, prompt_tokens: float = 0.0, prompts: float = 0.0
) -> bool:
    """Whether requests with these targets meet them if they decode together: is there a step of S seconds in
    which each has the shortest chain that yields S / tpot tokens? `counts` holds the number of requests by
    target. A step has `prompt_tokens` of prompts, as lately, or what makes `prompts` tokens a second, which
    are due of the prompts that have begun, whichever is more."""
    depths = dict.fromkeys(counts, 0)
    others = float(prompt_tokens)
    while True:
        drafting = sum(count for target, count in counts.items() if depths[target])
        query_tokens = sum(count * (1 + depths[target]) for target, count in counts.items())
        if query_tokens + others > MAX_QUERY_TOKENS:
            return False
        seconds = means.step(query_tokens + round(others)) + max(depths.values(), default=0) * means.draft(
            drafting
        )
        grew = others < prompts * seconds - 1
        others = max(others, prompts * seconds)
        for target in depths:
            if target is None or target == inf:
                continue
            while target * discounted_tokens(means.acceptance, depths[target]) < seconds:
                if depths[target] >= means.depth:
                    return False
                depths[target] += 1
                grew = True
        if not grew:
            return True


def admit(
    prompts: Sequence[RequestView],
    present: Sequence[RequestView],
    now: float,
    means: Means,
    prompt_tokens: int = 0,
) -> list[bool]:
    """Return which `prompts` are admitted to a batch with the requests `present`, which decode or have begun.
    Where not all can be, those with the least to compute go first, so that the most targets are met; those
    that can no longer meet theirs come last. To an empty batch, one is always admitted. A prompt does not
    wait for requests of less urgent priority, nor for a target that is infeasible even alone. A step had
    `prompt_tokens` of prompts lately."""
    targets = {request.tpot for request in (*present, *prompts)}
    feasible = {target: sustainable({target: 1}, means) for target in targets}
    targets_by_priority = Counter(
        (request.priority, request.tpot if feasible[request.tpot] else inf) for request in present
    )
    begun = [(request.priority, _due_rate(request, now)) for request in present if not request.decoding]
    admitted = [False] * len(prompts)
    for i in sorted(range(len(prompts)), key=lambda i: _admission_order(prompts[i])):
        prompt = prompts[i]
        target = prompt.tpot if feasible[prompt.tpot] else inf
        counts = Counter({target: 1})
        for (priority, other), count in targets_by_priority.items():
            if priority <= prompt.priority:
                counts[other] += count
        rate = _due_rate(prompt, now)
        due = rate + sum(other for priority, other in begun if priority <= prompt.priority)
        if prompt.aged_in or counts.total() == 1 or sustainable(counts, means, prompt_tokens, due):
            targets_by_priority[prompt.priority, target] += 1
            begun.append((prompt.priority, rate))
            admitted[i] = True
    return admitted


def _due_rate(prompt: RequestView, now: float) -> float:
    """Return the prompt tokens that are due in each second; 0 without a deadline, or with a missed one."""
    deadline = prompt.deadline
    return 0.0 if deadline is None or deadline <= now else prompt.remaining / max(deadline - now, 1e-3)


def _admission_order(prompt: RequestView) -> tuple[bool, int, bool, int]:
    return (not prompt.aged_in, prompt.priority, prompt.tpot == inf, prompt.remaining)
