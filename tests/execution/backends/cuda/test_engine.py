"""The engine on a device, with models made there. Captured passes give the same texts as direct ones, with
speculation, swaps and preemption. Except for ties, texts equal plain torch on the CPU."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import pytest
import torch
from torch import Tensor

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.execution.backends.cuda.executor import DeviceExecutor
from streamserve.execution.backends.cuda.graphs import CudaGraphs, Graphs, NoGraphs
from streamserve.execution.backends.cuda.operations import Implementation
from streamserve.execution.backends.cuda.passes import forward_shapes, sample_shapes
from streamserve.execution.backends.cuda.runner import Runner
from streamserve.execution.backends.cuda.swap import DeviceHostPool
from streamserve.execution.backends.cuda.warm_up import capture, compiling, layers_of_all_kinds
from streamserve.execution.drafters.choice import NO_DRAFT, DraftChoice
from streamserve.execution.formats.quantization import parse_format
from streamserve.execution.loading.device import DeviceBackend
from streamserve.execution.model.shapes import matrix_shapes, weight_shapes
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.config import Eviction
from streamserve.protocol.draft_kind import DraftKind
from streamserve.protocol.messages import DraftVerified, ModelInfo, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation, default_cost
from tests.conftest import Scale
from tests.execution.backends.cuda.specs import AROUND, MIXTURE, SPEC
from tests.execution.drive import BLOCK_SIZE

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LONGEST = 64


class RandomWeights:
    """A checkpoint with random tensors."""

    path = "random weights"

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        shapes = weight_shapes(spec)
        shapes |= {f"{name}.weight": shape for name, shape in matrix_shapes(spec).items()}
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {name: self._random(shape, generator) for name, shape in shapes.items()}

    def _random(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return 1 + noise / 10 if len(shape) == 1 else 1.5 * noise / math.sqrt(shape[-1])

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        return torch.cat([self._tensors[name] for name in names]).to(dtype)

    def read_ahead(self, layer: int) -> None:
        """Do nothing: no file is read."""

    def release(self) -> None:
        """Do nothing: no file was read."""


class StaleGraphs(NoGraphs):
    """Behaves like captured graphs: after the first call, a shape's first work is repeated, whatever the new
    arguments are."""

    def __init__(self) -> None:
        super().__init__()
        self._works: dict[Hashable, Any] = {}
        self.replays = 0

    def run(self, shape: Hashable, work: Any) -> None:
        self.replays += shape in self._works
        super().run(shape, self._works.setdefault(shape, work))


class Replayed(Protocol):
    replays: int


@dataclass(frozen=True)
class Case:
    """A model, and the settings that it is served with."""

    spec: ModelSpec = SPEC
    dtype: torch.dtype = torch.float32
    quantization: str = "none"
    kv: bool = False
    drafts: int = 0
    preempt_every: int = 0
    eviction: Eviction = "recompute"
    chunk: int = 512


def captured() -> Graphs:
    return CudaGraphs(DEVICE, 512 << 20) if ON_GPU else StaleGraphs()


@dataclass(frozen=True)
class Served:
    """An engine on a device. `graphs` belongs to the target model."""

    engine: Engine
    graphs: Any


def serve(
    case: Case, graphs: Graphs, device: torch.device = DEVICE, kind: Implementation | None = None
) -> Served:
    backend = DeviceBackend.on(device, 16, 512, kind or ("kernels" if ON_GPU else "plain"))
    weights: Any = RandomWeights(case.spec)
    format = parse_format(case.quantization)
    model = backend.model(weights, case.spec, case.dtype, format)
    cache = backend.cache(case.spec, 80, BLOCK_SIZE, case.dtype, case.kv)
    runner = backend.runner(model, cache)
    runner.graphs = graphs
    draft = DraftChoice(DraftKind.FIRST_LAYERS, layers=case.drafts) if case.drafts else NO_DRAFT
    drafter = backend.drafter(draft, model, cache, False, None)
    host = DeviceHostPool([cache], 40) if case.eviction == "swap" else None
    config = EngineConfig(
        num_blocks=80, block_size=BLOCK_SIZE, max_model_len=200, max_num_seqs=16, max_num_batched_tokens=512,
        max_chunk=case.chunk, preempt_every=case.preempt_every, eviction=case.eviction,
        swap_blocks=40 if host else 0, check=True,
    )  # fmt: skip
    info = ModelInfo(
        architecture="", parameters=0, vocab_size=300, max_model_len=200, eos_token_ids=(299,),
        weight_bytes=0, dtype="float32", row_invariant=False, fingerprint="test",
    )  # fmt: skip
    executor = DeviceExecutor(runner, (299,), host=host)
    speculation = Speculation(parse_policy("fixed-tree:2x2"), default_cost) if case.drafts else None
    return Served(Engine(config, info, executor, lambda: 0.0, drafter, speculation), graphs)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(1, LONGEST, (count,), generator=generator).tolist()
    return [torch.randint(290, (n,), generator=generator).tolist() for n in lengths]


@dataclass
class Outcome:
    texts: list[list[int]]
    accepted: int = 0


def generate(engine: Engine, temperature: float = 0.0, count: int = 6, tokens: int = 20) -> Outcome:
    outcome = Outcome([[] for _ in range(count)])
    for number, prompt in enumerate(prompts(count)):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=tokens, ignore_eos=True)
        engine.handle(Submit(str(number), prompt, params, outputs={0: []}, arrival=float(number)))
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token):
                outcome.texts[int(event.request)].append(event.token)
            if isinstance(event, DraftVerified):
                outcome.accepted += event.accepted
    assert [len(text) for text in outcome.texts] == [tokens] * count
    assert len({tuple(text) for text in outcome.texts}) == count
    return outcome


CASES = {
    "plain": Case(),
    "bf16": Case(dtype=torch.bfloat16),
    "norms around, caps": Case(AROUND),
    "mixture of experts": Case(MIXTURE, dtype=torch.bfloat16),
    "int4 weights, 8-bit KV": Case(quantization="int4:32", kv=True, dtype=torch.bfloat16),
    "int8 experts": Case(MIXTURE, quantization="int8:32"),
    "w8a8": Case(quantization="w8a8"),
    "speculation": Case(drafts=1),
    "swap": Case(preempt_every=4, eviction="swap", chunk=9),
    "preempted": Case(preempt_every=4, chunk=16, kv=True),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CASES)
def test_captured_passes_give_the_texts_of_direct_ones(name: str, temperature: float, scale: Scale) -> None:
    if not scale.full and not ON_GPU and temperature == (name != "plain"):
        pytest.skip("with --full")
    case = CASES[name]
    direct, replayed = serve(case, NoGraphs()), serve(case, captured())
    expected, found = generate(direct.engine, temperature), generate(replayed.engine, temperature)
    assert found.texts == expected.texts
    assert replayed.graphs.replays > 10
    assert (found.accepted > 0) == (case.drafts > 0)
    if case.preempt_every:
        assert replayed.engine.report().preemptions > 0


def test_steps_without_trees_run_only_shapes_that_were_captured_before() -> None:
    graphs: Any = captured()
    served = serve(CASES["preempted"], graphs)
    executor: Any = served.engine.executor
    capture(executor._runner, 16)
    before, replays = dict(graphs.shapes), graphs.replays
    texts = generate(served.engine, 0.7).texts
    assert graphs.shapes.keys() == before.keys(), "padding alone has compiled and captured what steps need"
    ran = sum(graphs.shapes.values()) - sum(before.values())
    assert graphs.replays - replays == ran > 40
    assert texts == generate(serve(CASES["preempted"], NoGraphs()).engine, 0.7).texts


@pytest.mark.parametrize("name", ["norms around, caps", "int4 weights, 8-bit KV", "mixture of experts"])
def test_kernels_are_compiled_with_the_first_layers_while_others_load(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    ran = NoGraphs()

    def load() -> Callable[[], Runner]:
        backend = DeviceBackend.on(DEVICE, 16, 512)
        spec = case.spec.first_layers(layers_of_all_kinds(case.spec))
        model = backend.model(
            cast(Any, RandomWeights(spec)), spec, case.dtype, parse_format(case.quantization)
        )
        cache = backend.cache(spec, 1, BLOCK_SIZE, case.dtype, case.kv)
        return lambda: backend.runner(model, cache, ran)

    with caplog.at_level("INFO"), compiling(load, 4, DEVICE):
        pass
    assert "compiled kernels" in caplog.text
    assert {*forward_shapes(4), *sample_shapes(4)} <= ran.shapes.keys()

    def fail() -> Callable[[], Runner]:
        raise ValueError("no memory")

    with compiling(fail, 4, DEVICE):
        pass
    assert "not compiled while the weights were loaded: no memory" in caplog.text


def test_the_first_layers_include_every_kind() -> None:
    spec = replace(SPEC, num_layers=5, windows=(8, 8, None, 8, None), ropes=SPEC.ropes[:1] * 5)
    assert layers_of_all_kinds(spec) == 3
    assert layers_of_all_kinds(replace(spec, windows=(None,) * 5)) == 1


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].dtype == torch.float32])
def test_texts_are_those_of_plain_torch_on_the_cpu(name: str) -> None:
    """Texts equal plain torch on the CPU: in float32 these models have no ties."""
    case = CASES[name]
    expected = generate(serve(replace(case, drafts=0, preempt_every=0, eviction="recompute", chunk=512),
                              NoGraphs(), torch.device("cpu"), "plain").engine)  # fmt: skip
    assert generate(serve(case, captured()).engine).texts == expected.texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_text(temperature: float) -> None:
    plain = generate(serve(CASES["plain"], NoGraphs()).engine, temperature)
    speculating = generate(serve(CASES["speculation"], captured()).engine, temperature)
    assert speculating.texts == plain.texts
    assert speculating.accepted > 0
