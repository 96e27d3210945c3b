"""In bfloat16, where rounding matters most, a request's text does not depend on batch, chunks or draft
tokens."""

import numpy as np
import pytest

from tests.execution.drive import Driver, Task, run_alone
from tests.execution.executing import KINDS, executor_of, prompt_of, random_trees


@pytest.fixture(scope="module")
def executor(shared_checkpoint, pool):
    pool()
    return executor_of(shared_checkpoint("llama", "bfloat16"), "native")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_text_does_not_depend_on_co_batched_requests(executor, kind, seed):
    rng = np.random.default_rng(seed)
    driver, tasks, expected = Driver(executor, seed), [], []
    for number in range(6):
        prompt = prompt_of(int(rng.integers(1, 40)), 10 * seed + number)
        expected.append(run_alone(executor, Task(prompt, KINDS[kind]), 20))
        draft = random_trees(expected[-1], seed) if number % 2 else None
        tasks.append(Task(prompt, KINDS[kind], chunk=int(rng.integers(1, 12)), draft=draft))
    for task in tasks:
        driver.add(task)
    while any(len(task.outputs) < 20 for task in tasks):
        driver.step()
    assert [task.outputs[:20] for task in tasks] == expected
    assert sum(task.accepted for task in tasks) > 10
