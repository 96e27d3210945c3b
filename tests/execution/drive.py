"""A minimal driver of an executor: one pool, sequences whose blocks are allocated as they grow."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from streamserve.contracts.plan import Sampled, SequenceState, Span, SpanResult, StepPlan
from streamserve.contracts.tree import TokenTree, root
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.protocol.sampling import SamplingParams

BLOCK_SIZE = 4
NUM_BLOCKS = 120

TreeMaker = Callable[[int, int], TokenTree]
"""A function that makes a tree from a root token and the number of outputs."""


@dataclass
class Task:
    """A request's sequence: `tokens` are prompt and outputs, `computed` of them have KV."""

    prompt: list[int]
    params: SamplingParams
    choice: int = 0
    chunk: int = 10_000
    draft: TreeMaker | None = None
    choices: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    forks: list[list[Sampled]] = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    accepted: int = 0
    adapter: str = ""

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.prompt)
        self.choices = self.choices or (self.choice,)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


class Driver:
    """Runs tasks together on one executor, `step` by `step`."""

    def __init__(self, executor: TorchExecutor, seed: int = 0) -> None:
        self.executor = executor
        self.tasks: dict[int, Task] = {}
        self.free = np.random.default_rng(seed).permutation(NUM_BLOCKS).tolist()
        self.released: list[int] = []
        self.admitted: list[SequenceState] = []
        self.copies: list[tuple[int, int]] = []
        self.rows: list[int] = []
        self._names = 0

    def add(self, task: Task) -> int:
        self._names += 1
        self.tasks[self._names] = task
        state = SequenceState(self._names, task.choice, task.params, list(task.prompt), list(task.outputs))
        self.admitted.append(state)
        return self._names

    def remove(self, name: int) -> Task:
        """Remove a task. Its blocks are free for other tasks at once."""
        task = self.tasks.pop(name)
        self.free += task.blocks
        self.released.append(name)
        return task

    def step(self) -> None:
        spans = [self._span(name, task) for name, task in self.tasks.items()]
        plan = StepPlan(0, self.admitted, self.released, self.copies, spans)
        self.released, self.admitted, self.copies = [], [], []
        self.rows.append(sum(span.query_tokens for span in spans))
        results = self.executor.run(plan).spans
        assert [result.sequence for result in results] == [span.sequence for span in spans]
        for span, result in zip(spans, results, strict=True):
            self._commit(self.tasks[span.sequence], span, result)

    def _span(self, name: int, task: Task) -> Span:
        tokens = task.tokens[task.computed : task.computed + task.chunk]
        tree = None
        if task.computed + len(tokens) == len(task.tokens):
            tree = root(tokens[-1]) if task.draft is None else task.draft(tokens[-1], len(task.outputs))
        rows = len(tokens) + (len(tree) - 1 if tree else 0)
        while len(task.blocks) * BLOCK_SIZE < task.computed + rows:
            task.blocks.append(self.free.pop())
        return Span(
            name,
            task.computed,
            tokens,
            list(task.blocks),
            tree,
            task.choices if tree else (),
            prompt_logprobs=task.params.prompt_logprobs,
            adapter=task.adapter,
        )

    def _commit(self, task: Task, span: Span, result: SpanResult) -> None:
        task.prompt_logprobs += result.prompt_logprobs
        task.computed += len(span.tokens)
        if span.tree is None:
            assert result.outputs == []
            return
        first, *task.forks = result.outputs
        task.choices = task.choices[:1]
        task.sampled += first
        task.tokens += [result.token for result in first]
        task.computed += len(first) - 1
        task.accepted += len(first) - 1


def run_alone(executor: TorchExecutor, task: Task, count: int) -> list[int]:
    """Return the first `count` outputs of a task that runs alone on the executor."""
    driver = Driver(executor)
    name = driver.add(task)
    while len(task.outputs) < count:
        driver.step()
    driver.remove(name)
    driver.step()
    return task.outputs[:count]
