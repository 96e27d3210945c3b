"""In bfloat16, where rounding decides: a request's text is the same alone, among others, cut and guessed."""

import numpy as np
import pytest

from tests.execution.drive import Driver, Job, run_alone
from tests.execution.test_executor import KINDS, executor_of, guesser, prompt_of


@pytest.fixture(scope="module")
def executor(shared_checkpoint, team):
    team()
    return executor_of(shared_checkpoint("llama", "bfloat16"), "native")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_text_is_the_same_in_any_company(executor, kind, seed):
    rng = np.random.default_rng(seed)
    driver, jobs, expected = Driver(executor, seed), [], []
    for number in range(6):
        prompt = prompt_of(int(rng.integers(1, 40)), 10 * seed + number)
        expected.append(run_alone(executor, Job(prompt, KINDS[kind]), 20))
        guess = guesser(expected[-1], seed) if number % 2 else None
        jobs.append(Job(prompt, KINDS[kind], chunk=int(rng.integers(1, 12)), guess=guess))
    for job in jobs:
        driver.add(job)
    while any(len(job.outputs) < 20 for job in jobs):
        driver.step()
    assert [job.outputs[:20] for job in jobs] == expected
    assert sum(job.accepted for job in jobs) > 10
