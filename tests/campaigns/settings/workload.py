"""The requests of settings trials: numbered, so that each text is computed once per checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec

from streamserve.protocol.grammar import Grammar
from streamserve.protocol.sampling import SamplingParams, Slo, SpeculationLimits

REQUESTS = 120
"""Number of different requests."""
SHARED_PREFIX_LENGTH = 48
GRAMMARS = (
    Grammar(kind="regex", text="[0-9]{2,6}(,[0-9]{2,6}){0,5}"),
    Grammar(kind="choice", text='["yes","no","perhaps not"]'),
    Grammar(
        kind="json",
        text='{"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":99},'
        '"b":{"enum":["x","yy"]}},"required":["a","b"],"additionalProperties":false}',
    ),
)


@dataclass(frozen=True)
class TrialRequest:
    """One request. `edits` are the earlier versions of its prompt if it is a prompt stream, which with
    `early` is answered from the first version on. `adapter` is the name of its LoRA adapter, if it has
    one."""

    number: int
    prompt: list[int]
    params: SamplingParams
    edits: tuple[list[int], ...] = ()
    adapter: str = ""
    early: bool = False


def make_request(number: int, vocabulary: int) -> TrialRequest:
    """Return the request of that number: short and long prompts, some with a common head, some of random
    tokens, greedy and sampled, one choice or several, free, with stop strings, biased, or with a grammar."""
    rng = Random(f"request-{number}")
    shared_prefix = [5 + (7 * position) % 200 for position in range(SHARED_PREFIX_LENGTH)]

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, vocabulary) for _ in range(count)]

    suffix = tokens(rng.choice((1, 3, 15, 16, 17, 30, 63, 100, rng.randint(1, 150))))
    if number % 7 == 3:
        suffix = (suffix[:5] * 40)[: len(suffix)]  # The prompt repeats itself, so drafts are accepted.
    prompt = shared_prefix + suffix if number % 3 == 0 else suffix
    grammar = rng.choice(GRAMMARS) if number % 6 == 5 else None
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
        top_k=rng.choice((0, 0, 20)),
        top_p=rng.choice((1.0, 1.0, 0.9)),
        min_p=rng.choice((0.0, 0.0, 0.02)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
        logit_bias=rng.choice(({}, {}, {7: 2.0, 9: -100.0})),
        seed=number,
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        max_tokens=rng.choice((1, 2, 8, 24, 24, 48)),
        min_tokens=rng.choice((0, 0, 1)),
        stop=() if number % 5 or grammar else ("e", "th"),
        ignore_eos=grammar is None and rng.random() < 0.5,
        logprobs=rng.choice((None, None, 0, 3)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
        grammar=grammar,
    )
    edits: tuple[list[int], ...] = ()
    if number % 8 == 1:
        edits = tuple(prompt[: rng.randrange(len(prompt) + 1)] + tokens(rng.randint(0, 20)) for _ in range(3))
        params = msgspec.structs.replace(params, prompt_logprobs=None)
    return TrialRequest(number, prompt, params, edits)


def with_adapter(request: TrialRequest, adapters: Sequence[str]) -> TrialRequest:
    """Return the request with the adapter that its number selects. If adapters are served, a third of the
    requests have one."""
    return replace(request, adapter=adapters[0]) if adapters and request.number % 3 == 1 else request


def with_neutral_fields(request: TrialRequest, rng: Random) -> TrialRequest:
    """Return the request with fields that must not change its text: latency targets, speculation limits."""
    params = request.params
    if rng.random() < 0.3:
        slo = Slo(
            tpot_ms=rng.choice((None, 1.0, 50.0, 1000.0)), ttft_ms=rng.choice((None, 10.0, 1000.0, 1e5))
        )
        params = msgspec.structs.replace(params, slo=slo)
    if rng.random() < 0.3:
        limits = SpeculationLimits(
            enabled=rng.random() < 0.7, max_depth=rng.choice((1, 3, 20)), max_nodes=rng.choice((1, 8, 64))
        )
        params = msgspec.structs.replace(params, speculation=limits)
    return replace(request, params=params)
