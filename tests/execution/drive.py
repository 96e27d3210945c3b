"""The least that drives an executor: one pool, sequences whose blocks are handed out as they grow."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from streamserve.engine.plan import Sampled, SequenceState, Span, SpanResult, StepPlan
from streamserve.execution.executor import TorchExecutor
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.tree import TokenTree, root

BLOCK_SIZE = 4
NUM_BLOCKS = 120

Guess = Callable[[int, int], TokenTree]
"""From a root token and how many outputs there are, a tree behind it."""


@dataclass
class Job:
    """A request's sequence: `tokens` are prompt and outputs, `computed` of them have KV."""

    prompt: list[int]
    params: SamplingParams
    choice: int = 0
    chunk: int = 10_000
    guess: Guess | None = None
    choices: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    forks: list[list[Sampled]] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        self.choices = self.choices or (self.choice,)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Driver:
    """Runs jobs together on one executor, `step` by `step`."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.jobs: dict[int, Job] = {}
        self.free = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
        self.released: list[int] = []
        self.admitted: list[SequenceState] = []
        self.copies: list[tuple[int, int]] = []
        self.rows: list[int] = []
        self._names = 0

    def add(self, job: Job) -> int:
        self._names += 1
        self.jobs[self._names] = job
        state = SequenceState(self._names, job.choice, job.params, list(job.prompt), list(job.outputs))
        self.admitted.append(state)
        return self._names

    def remove(self, name: int) -> Job:
        """Take a job away; its blocks are free for others at once."""
        job = self.jobs.pop(name)
        self.free += job.blocks
        self.released.append(name)
        return job

    def step(self) -> None:
        spans = [self._span(name, job) for name, job in self.jobs.items()]
        plan = StepPlan(0, self.admitted, self.released, self.copies, spans)
        self.released, self.admitted, self.copies = [], [], []
        self.rows.append(sum(span.rows for span in spans))
        result = self.executor.run(plan)
        assert [one.sequence for one in result.spans] == [span.sequence for span in spans]
        for span, one in zip(spans, result.spans, strict=True):
            self._commit(self.jobs[span.sequence], span, one)

    def _span(self, name: int, job: Job) -> Span:
        tokens = job.tokens[job.computed : job.computed + job.chunk]
        tree = None
        if job.computed + len(tokens) == len(job.tokens):
            tree = root(tokens[-1]) if job.guess is None else job.guess(tokens[-1], len(job.outputs))
        rows = len(tokens) + (len(tree) - 1 if tree else 0)
        while len(job.blocks) * BLOCK_SIZE < job.computed + rows:
            job.blocks.append(self.free.pop())
        return Span(
            name,
            job.computed,
            tokens,
            list(job.blocks),
            tree,
            job.choices if tree else (),
            prompt_logprobs=job.params.prompt_logprobs,
        )

    def _commit(self, job: Job, span: Span, result: SpanResult) -> None:
        job.prompt_logprobs += result.prompt_logprobs
        job.computed += len(span.tokens)
        if span.tree is None:
            assert result.outputs == []
            return
        first, *job.forks = result.outputs
        job.choices = job.choices[:1]
        job.sampled += first
        job.tokens += [one.token for one in first]
        job.computed += len(first) - 1
        job.accepted += len(first) - 1


def run_alone(executor: TorchExecutor, job: Job, count: int) -> list[int]:
    """The first `count` outputs of a job that has the executor to itself."""
    driver = Driver(executor)
    name = driver.add(job)
    while len(job.outputs) < count:
        driver.step()
    driver.remove(name)
    driver.step()
    return job.outputs[:count]
