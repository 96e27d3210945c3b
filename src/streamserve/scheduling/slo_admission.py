"""SLO admission: decide which prompts may begin, so that decoding requests can stay on their latency targets.

A computed prompt becomes a decoding request, and makes every step of the other requests longer. A prompt
waits if its target and the other requests' targets could not all be met from then on: so some requests meet
their targets where otherwise none would. A request that already holds memory always continues.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

from streamserve.scheduling.ordering import MAX_WAIT
from streamserve.scheduling.request import RequestView
from streamserve.speculation.outlook import Means
from streamserve.speculation.shapes import expected_tokens

MAX_QUERY_TOKENS = 4096
"""Maximum query tokens of a step in the search of `sustainable`."""
HEADROOM = 0.9
"""Share of the expected accepted draft tokens that admission relies on: acceptance comes in streaks."""
GRACE = MAX_WAIT / 10
"""Minimum seconds that a prompt waits for other requests' targets before it is admitted at their cost."""


def needs_admission(view: RequestView) -> bool:
    """Whether a prompt has not begun yet and will decode on this worker once it is computed."""
    return view.decodes_here and view.complete and not (view.running or view.outputs)


def has_begun(view: RequestView) -> bool:
    """Whether a prompt that was admitted earlier continues, and will decode on this worker."""
    return view.decodes_here and view.complete and (view.running or view.outputs > 0)


def aging_in(prompts: Sequence[RequestView], now: float) -> int | None:
    """Return the index of the first of `prompts` that is admitted because of its age: it has waited longer
    than GRACE, and has no deadline that it can still meet. None if there is none."""
    for i, prompt in enumerate(prompts):
        timely = prompt.deadline is not None and now <= prompt.deadline
        if not timely and now - prompt.arrival > GRACE:
            return i
    return None


def discounted_tokens(acceptance: float, depth: int) -> float:
    """Return the tokens that admission expects of a step for one request with a chain of `depth` draft
    tokens, each accepted with probability `acceptance`; only HEADROOM of the accepted draft tokens counts."""
    return 1.0 + HEADROOM * (expected_tokens(acceptance, depth) - 1.0)


def sustainable(
    counts: Mapping[float | None, int], means: Means, prompt_tokens: float = 0.0, prompts: float = 0.0
) -> bool:
    """Whether requests that decode together can meet their targets.

    They can if a step of S seconds exists in which each request has the shortest draft chain that yields
    S / tpot tokens. `counts` holds the number of requests by target. The step also has the greater of two
    numbers of prompt tokens: `prompt_tokens`, the recent mean, and S * `prompts`, where `prompts` is the due
    prompt tokens a second of the prompts that have begun.
    """
    # A fixed point from below: longer chains lengthen the step, which may require longer chains again.
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
    """Return, for each of `prompts`, whether it is admitted to a batch with the requests `present`, which
    decode or have begun.

    If not all can be admitted, prompts with the least to compute go first, so that the most targets are met;
    prompts that can no longer meet theirs come last. An empty batch always gets one prompt. A prompt does not
    wait for requests of less urgent priority, nor for a target that is infeasible even alone.
    `prompt_tokens` is the recent mean of prompt tokens a step.
    """
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
    """Return the prompt tokens that are due each second until the deadline; 0 without a deadline, or with a
    missed one."""
    deadline = prompt.deadline
    return 0.0 if deadline is None or deadline <= now else prompt.remaining / max(deadline - now, 1e-3)


def _admission_order(prompt: RequestView) -> tuple[bool, int, bool, int]:
    return (not prompt.aged_in, prompt.priority, prompt.tpot == inf, prompt.remaining)
