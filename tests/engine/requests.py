"""Random requests to an engine."""

import random

from streamserve.protocol.sampling import SamplingParams, Slo
from tests.engine.drive import VOCAB, submit


def random_requests(rng: random.Random, count: int, max_model_len: int) -> list:
    """Return requests with shared prefixes, greedy and sampled, with one or several choices."""
    head = [rng.randrange(VOCAB) for _ in range(40)]
    requests = []
    for number in range(count):
        prompt = head[: rng.choice((0, 8, 30, 40))] + [
            rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))
        ]
        n = rng.choice((1, 1, 1, 2, 4))
        params = SamplingParams(
            n=n, temperature=rng.choice((0.0, 1.0)), seed=number, max_tokens=rng.randint(1, 25),
            prompt_logprobs=rng.choice((None, None, None, 1)),
            slo=Slo(tpot_ms=rng.choice((None, 900.0, 5e3)), ttft_ms=rng.choice((None, 2e3, 1e5))),
        )  # fmt: skip
        requests.append(submit(f"r{number}", prompt, params, arrival=number, priority=rng.choice((0, 0, 1))))
    return requests
