"""Each architecture in each format works plain, with speculation, with prompts that arrive in parts, and with
LoRA adapters. The text of a seed is the same in all of them, or the model is refused by name when it is
loaded."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamserve.baselines.speculation import parse_policy
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import LoadAdapter, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.controller import Speculation
from tests.adapters import ALL, ATTENTION, FUSED, opened, write_adapter
from tests.conftest import Scale
from tests.engine.drive import Collected
from tests.engine.edits import StreamClient, run_scripts
from tests.matrix.cells import ARCHITECTURES, REFUSED, Written, diagonal, everything, write_cell

LONGEST = 60


def make_engine(written: Written, draft: str, policy: str) -> Engine:
    settings: dict[str, Any] = {"dtype": "auto"} | written.settings
    loaded = load(
        ModelConfig(
            path=str(written.path), threads=1, block_size=4, num_blocks=400, max_model_len=96,
            max_num_seqs=16, max_num_batched_tokens=64, max_chunk=16, draft=draft, max_loras=2, **settings,
        )
    )  # fmt: skip
    assert loaded.model_info.backend.startswith("native")
    ticks = iter(range(10**9))
    return Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: float(next(ticks)), loaded.drafter,
        Speculation(parse_policy(policy), lambda rows, kv_tokens: 1.0 + rows / 64),
        EnginePorts(adapters=loaded.adapters),
    )  # fmt: skip


def texts(engine: Engine, requests: list[Submit], together: bool) -> Collected:
    """Return the texts of requests that are served one after another, or at once."""
    collected = Collected()
    for request in requests:
        collected.take(engine.handle(request))
        while engine.has_work and not together:
            collected.take(engine.step())
    while engine.has_work:
        collected.take(engine.step())
    return collected


def requests_of(rng: random.Random, count: int) -> list[Submit]:
    """Return greedy and sampled requests whose prompts repeat themselves."""
    out = []
    for number in range(count):
        prompt = ([rng.randrange(4, 300) for _ in range(rng.randint(1, 9))] * 40)[: rng.randint(1, 70)]
        params = SamplingParams(temperature=number % 2 * 0.8, seed=number, max_tokens=16, ignore_eos=True)
        out.append(Submit(f"r{number}", prompt, params, outputs={0: []}, arrival=float(number)))
    return out


@pytest.fixture(autouse=True)
def _few_files(tmp_path: Path) -> Any:
    """Remove the files of each cell: a full run has hundreds of cells."""
    yield
    shutil.rmtree(tmp_path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        cells = everything() if metafunc.config.getoption("--full") else diagonal()
        metafunc.parametrize(("architecture", "format"), cells)


def test_a_cell_has_one_text_or_is_refused_by_name(
    tmp_path: Path, architecture: str, format: str, scale: Scale, record: Callable[..., None]
) -> None:
    written = write_cell(tmp_path, architecture, format)
    if reason := REFUSED.get((architecture, format)):
        with pytest.raises(CheckpointError, match=reason):
            make_engine(written, "none", "off")
        record(architecture=architecture, format=format, refused=reason)
        return
    rng = random.Random(scale.seed)
    requests = requests_of(rng, scale.pick(3, 10))
    plain, speculating = make_engine(written, "none", "off"), make_engine(written, "self:1", "fixed-tree:2x3")
    expected = texts(plain, requests, together=False)
    assert len(expected.tokens) == len(requests)
    assert texts(plain, requests, together=True).tokens == expected.tokens
    assert texts(speculating, requests, together=True).tokens == expected.tokens
    assert speculating.speculation.counters.accepted > 0
    adapted(tmp_path, architecture, requests, expected, plain, speculating)
    count = edited(rng, speculating, plain, scale.pick(3, 8))
    record(
        architecture=architecture, format=format, requests=len(requests), edits=count["mid_step"],
        accepted=speculating.speculation.counters.accepted,
    )  # fmt: skip
    for engine in (plain, speculating):
        engine.executor.close()


def scores(
    engine: Engine, requests: list[Submit], together: bool
) -> dict[str, list[tuple[int, float | None]]]:
    """Return the tokens and log-probabilities of requests, served one after another or at once."""
    found: dict[str, list[tuple[int, float | None]]] = {request.request: [] for request in requests}
    for request in requests:
        engine.handle(request)
        while engine.has_work and (not together or request is requests[-1]):
            for event in engine.step():
                if isinstance(event, Token):
                    found[event.request].append((event.token, event.logprob))
    return found


def adapted(
    folder: Path, architecture: str, requests: list[Submit], base: Collected, *engines: Engine
) -> None:
    """Compare the texts of two LoRA adapters and the base, alone and in a batch, with and without drafts."""
    counts = {"num_experts", "num_local_experts", "n_routed_experts"}
    experts = counts & ARCHITECTURES[architecture].keys()
    modules = ATTENTION if experts else (*ALL, *FUSED)
    names = [""]
    for seed in range(2):
        path = write_adapter(folder / f"adapter-{seed}", folder / "source", modules, 5, seed=seed, gain=2.0)
        adapter = opened(path.name, path)
        names.append(adapter.fingerprint)
        for engine in engines:
            engine.handle(LoadAdapter(adapter.fingerprint, adapter.path))
    for engine in engines:
        assert [answer.error for answer in engine.adapters.take_answers()] == ["", ""]
    mixed = [
        replace(
            request,
            request=f"{request.request} {name}",
            adapter=name,
            params=replace(request.params, logprobs=0),
        )
        for request in requests
        for name in names
    ]
    plain, speculating = engines
    expected = scores(plain, mixed, together=False)
    assert scores(plain, mixed, together=True) == expected
    assert scores(speculating, mixed, together=True) == expected
    of_base = [scored for name, scored in expected.items() if name.endswith(" ")]
    assert [[token for token, _ in scored] for scored in of_base] == list(base.tokens.values())
    if not architecture.startswith("gemma"):  # a random prompt repeats a token with probability 1
        assert len(set(map(tuple, expected.values()))) == len(mixed)


def edited(rng: random.Random, engine: Engine, plain: Engine, clients: int) -> Counter[str]:
    """Compare prompts that arrive in parts with the same prompts sent at once."""
    streams = [StreamClient(rng, number, LONGEST) for number in range(clients)]
    count, collected = run_scripts(rng, engine, streams)
    expected = Collected()
    for stream in streams:
        outputs: dict[int, list[int]] = {choice: [] for choice in range(stream.params.n)}
        plain.handle(Submit(stream.name, stream.prompt, stream.params, outputs=outputs))
        while plain.has_work:
            expected.take(plain.step())
    assert collected.tokens == expected.tokens
    assert collected.finish == expected.finish
    return count
