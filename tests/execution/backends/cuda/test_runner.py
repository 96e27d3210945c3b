"""A step on a device has a limited number of launches, waits for the device once, and is unaffected by
padding."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from streamserve.contracts.plan import StepPlan
from streamserve.engine.engine import Engine
from streamserve.execution.backends.cuda.executor import DeviceExecutor
from streamserve.execution.backends.cuda.graphs import ROWS, bucket
from streamserve.execution.backends.cuda.operations import Operations, operations
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.loading.device import DeviceBackend
from streamserve.execution.loading.load import load
from streamserve.execution.model.spec import read_spec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Driver, Task

GREEDY = SamplingParams(temperature=0, max_tokens=100)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=100)
HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "item"}
"""Operations that need a value on the host, for which the host would wait for the device."""


class Recorded(TorchDispatchMode):
    """Counts torch's operations outside of the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def counted(kernels: Counter[str]) -> Operations:
    """Return plain operations that count each call as one kernel. The operations inside of them are not
    recorded."""

    def one(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kernels[function.__name__] += 1
            with _disable_current_modes():
                return function(*args, **kwargs)

        return run

    def module(of: Any) -> Any:
        return SimpleNamespace(**{n: one(f) for n, f in vars(of).items() if callable(f) and n[0] != "_"})

    return Operations(*map(module, operations("plain")))  # type: ignore[arg-type]


@pytest.fixture
def stepping(shared_checkpoint) -> Iterator[tuple[Driver, DeviceExecutor, Counter[str], Any]]:
    kernels: Counter[str] = Counter()
    folder = shared_checkpoint()
    spec = read_spec(folder)
    backend = DeviceBackend(torch.device("cpu"), counted(kernels), 16, 400)
    model = backend.model(Checkpoint(folder), spec, torch.float32)
    cache = backend.cache(spec, NUM_BLOCKS, BLOCK_SIZE, torch.float32)
    executor = DeviceExecutor(backend.runner(model, cache), spec.eos_token_ids)
    yield Driver(executor), executor, kernels, spec
    executor.close()


def test_a_step_launches_a_fixed_number_of_kernels_and_waits_once(stepping) -> None:
    driver, executor, kernels, spec = stepping
    for number in range(5):
        driver.add(Task([3 + number, 9, 4], SEEDED if number % 2 else GREEDY))
    driver.step()
    kernels.clear()
    runner = executor._runner
    waits, steps = runner.waits, 6
    with Recorded() as recorded:
        for _ in range(steps):
            driver.step()
    assert runner.waits - waits == steps
    assert not recorded.calls.keys() & HOST_READS
    a_layer = {"add_rms_norm": 2, "rotate_and_store": 1, "attend": 1, "gate": 1}
    expected = Counter({name: steps * count * spec.num_layers for name, count in a_layer.items()})
    expected += Counter(dict.fromkeys(("add_rms_norm", "gather_tokens", "embed", "choose_tokens"), steps))
    assert kernels == expected
    assert recorded.calls["linear"] == steps * (4 * spec.num_layers + 1)


def test_padding_writes_only_to_its_own_block(stepping) -> None:
    driver, executor, _, _ = stepping
    cache = executor._runner.cache.data
    cache.fill_(7.0)
    for number in range(5):
        driver.add(Task([3 + number, 9, 4], GREEDY))
    driver.step()
    driver.step()
    owned = {block for task in driver.tasks.values() for block in task.blocks}
    assert bucket(5) == 8
    for block in range(NUM_BLOCKS):
        assert bool((cache[:, block] == 7.0).all()) == (block not in owned)
    assert not bool((cache[:, NUM_BLOCKS] == 7.0).all()), "padding rows write to the last block"


def test_shapes_are_those_of_the_buckets(stepping) -> None:
    driver, executor, _, _ = stepping
    for number in range(7):
        driver.add(Task([3 + number] * (number + 1), GREEDY))
        driver.step()
    shapes = executor._runner.graphs.shapes
    assert {shape.rows for shape in shapes if hasattr(shape, "rows")} <= set(ROWS)
    assert max(shapes.values()) > 1, "a shape occurs again"


def test_a_released_sequence_is_forgotten(stepping) -> None:
    driver, executor, _, _ = stepping
    name = driver.add(Task([3, 9, 4], GREEDY))
    driver.step()
    assert executor._sequences.keys() == {name}
    executor.run(StepPlan(0, [], [name], [], []))
    assert not executor._sequences


def test_buckets_are_the_smallest_that_hold_a_count() -> None:
    for count in range(1, ROWS[-1] + 1):
        size = bucket(count)
        assert size is not None
        assert size >= count
        assert not [other for other in ROWS if count <= other < size]
    assert bucket(ROWS[-1] + 1) is None


def test_a_step_with_more_rows_than_any_bucket_samples_from_its_own_states(shared_checkpoint) -> None:
    folder = shared_checkpoint("llama", max_position_embeddings=4096)
    prompt = [3 * position % 300 + 4 for position in range(2100)]
    texts = []
    for chunk in (4096, 512):
        config = ModelConfig(
            path=str(folder), backend="device", num_blocks=256, max_num_batched_tokens=4096, max_chunk=chunk
        )
        loaded = load(config)
        engine = Engine(loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        engine.handle(Submit("r", prompt, params, outputs={0: []}))
        texts.append([])
        while engine.has_work:
            texts[-1] += [event.token for event in engine.step() if isinstance(event, Token)]
        rows = {shape.rows for shape in loaded.executor._runner.graphs.shapes if hasattr(shape, "rows")}
        assert (512 in rows) == (chunk == 512), "no bucket has the size of the whole prompt"
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3
