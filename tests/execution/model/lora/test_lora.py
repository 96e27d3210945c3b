"""With a LoRA adapter, log-probabilities equal those of merged weights, for every module, architecture and
backend; a row's bits do not depend on the adapters of other rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.execution.backends.native.library import Path as KernelPath
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.backends.native.paths import name_of, numerics_of
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import SamplingParams
from tests.adapters import ALL, ATTENTION, FUSED, MLP, merge, opened, write_adapter
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.exact.pair_models import MODELS
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS, Driver, Task
from tests.ggufs import write_gguf

CLOSE = 1e-4
SCORED = SamplingParams(temperature=0.0, seed=0, max_tokens=64, logprobs=2, prompt_logprobs=0)
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=64, logprobs=2)
PROMPT = [5 + 13 * number % 300 for number in range(40)]
EXPERTS = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss", "glm4_moe")
ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3", *MODELS]
COMBINATIONS = [*((name,) for name in ALL), ("q_proj", "v_proj"), ATTENTION, MLP, ALL]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "base")


def loaded_model(folder: Path, **settings: Any) -> Loaded:
    fields = {"threads": 2, "draft": "none", "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE} | settings
    return load(ModelConfig(path=str(folder), **fields))


def added(loaded: Loaded, *folders: Path) -> list[str]:
    """Load adapters; return their fingerprints."""
    adapters = [opened(folder.name, folder) for folder in folders]
    assert loaded.adapters is not None
    for adapter in adapters:
        loaded.adapters.load(adapter.fingerprint, adapter.path)
    return [adapter.fingerprint for adapter in adapters]


def prompt_scores(loaded: Loaded, adapter: str = "", chunk: int = 10_000) -> torch.Tensor:
    """Return the log-probabilities of the prompt's tokens."""
    driver = Driver(loaded.executor)
    name = driver.add(Task(PROMPT, SCORED, adapter=adapter, chunk=chunk))
    while not driver.tasks[name].outputs:
        driver.step()
    return torch.tensor([entry.logprob for entry in driver.remove(name).prompt_logprobs])


def assert_merged(base: Path, adapter: Path, merged: Path, **settings: Any) -> None:
    """Assert that an adapter computes the same as merged weights, and something else than the base model."""
    served = loaded_model(base, max_loras=1, **settings)
    (fingerprint,) = added(served, adapter)
    scores, expected = prompt_scores(served, fingerprint), prompt_scores(loaded_model(merged, **settings))
    assert (scores - expected).abs().max() < CLOSE
    assert (scores - prompt_scores(served)).abs().max() > 100 * CLOSE


@pytest.mark.parametrize("modules", COMBINATIONS, ids="+".join)
def test_logprobs_are_those_of_merged_weights(base: Path, tmp_path: Path, modules: tuple[str, ...]) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, modules, rank=5, use_rslora=len(modules) > 1)
    assert_merged(base, adapter, merge(base, adapter, tmp_path / "merged"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(tmp_path: Path, architecture: str) -> None:
    fields = MODELS[architecture].fields if architecture in MODELS else {}
    modules = FUSED if architecture == "phi3" else ATTENTION if architecture in EXPERTS else ALL
    folder = make_checkpoint(tmp_path / "base", architecture, **fields)
    adapter = write_adapter(tmp_path / "adapter", folder, modules, rank=8)
    assert_merged(folder, adapter, merge(folder, adapter, tmp_path / "merged"))


def test_the_rows_of_a_gguf_file(base: Path, tmp_path: Path) -> None:
    """Adapters work with the rows of a GGUF file, whose queries and keys are stored in another order."""
    write_gguf(base, tmp_path / "model.gguf")
    adapter = write_adapter(tmp_path / "adapter", base, rank=3)
    assert_merged(tmp_path / "model.gguf", adapter, merge(base, adapter, tmp_path / "merged"))


def test_the_reference_backend(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, rank=3)
    assert_merged(base, adapter, merge(base, adapter, tmp_path / "merged"), backend="reference")


def test_ranks_and_scales_by_pattern_and_a_part_of_the_layers(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(
        tmp_path / "adapter", base, layers=[1],
        rank_pattern={"k_proj": 20, "^model.layers.1.mlp.up_proj": 1, r"layers\.1\.self_attn\.o_proj": 7},
        alpha_pattern={"self_attn.q_proj": 1, r".*\.mlp\.(up|down)_proj": 3},
    )  # fmt: skip
    assert_merged(base, adapter, merge(base, adapter, tmp_path / "merged"))


def test_sizes_that_fill_no_tile(tmp_path: Path) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 18, "num_key_value_heads": 1}
    folder = make_checkpoint(tmp_path / "base", **sizes)
    adapter = write_adapter(tmp_path / "adapter", folder, rank=17)
    assert_merged(folder, adapter, merge(folder, adapter, tmp_path / "merged"))


def sampled(loaded: Loaded, tasks: list[Task], steps: int) -> list[list[tuple[int, float | None]]]:
    """Return the tokens and log-probabilities of tasks that run together."""
    driver = Driver(loaded.executor, seed=len(tasks))
    names = [driver.add(task) for task in tasks]
    for _ in range(steps):
        driver.step()
    return [[(token.token, token.logprob) for token in driver.remove(name).sampled][:steps] for name in names]


def tasks_of(adapters: list[str]) -> list[Task]:
    """Return a task for each adapter, with prompts and chunks of different lengths."""
    return [
        Task(PROMPT[number % 7 : 9 + number % 5], GREEDY, adapter=adapter, chunk=(10_000, 3)[number % 2])
        for number, adapter in enumerate(adapters)
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4:32", "dtype": "bfloat16"}],
    ids=lambda settings: "-".join(settings.values()) or "float32",
)
def test_twenty_adapters_and_the_base_in_one_batch_equal_each_alone(
    base: Path, tmp_path: Path, scale: Scale, settings: dict[str, Any]
) -> None:
    steps = scale.pick(6, 12)
    loaded = loaded_model(base, max_loras=20, backend="native", **settings)
    folders = [
        write_adapter(tmp_path / f"a{seed}", base, (ALL, ATTENTION, MLP)[seed % 3], 1 + seed % 9, seed=seed)
        for seed in range(20)
    ]
    adapters = ["", *added(loaded, *folders), ""]
    together = sampled(loaded, tasks_of(adapters), steps)
    alone = [sampled(loaded, [task], steps)[0] for task in tasks_of(adapters)]
    assert together == alone
    plain = loaded_model(base, backend="native", **settings)
    assert [sampled(plain, [tasks_of(adapters)[number]], steps)[0] for number in (0, 21)] == [
        together[number] for number in (0, 21)
    ]
    different = {tuple(token for token, _ in outputs) for outputs in together}
    assert len(different) > 15


def test_weights_in_integers_have_the_adapter_in_full(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, rank=6)
    merged = prompt_scores(loaded_model(merge(base, adapter, tmp_path / "merged")))
    rounded = loaded_model(base, max_loras=1, quantization="int8", backend="native")
    (fingerprint,) = added(rounded, adapter)
    without = prompt_scores(rounded)
    rounding = (without - prompt_scores(loaded_model(base))).abs().mean()
    distance = (prompt_scores(rounded, fingerprint) - merged).abs().mean()
    assert distance < 3 * rounding < (without - merged).abs().mean()


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, CLOSE), (torch.bfloat16, 0.1)], ids=str)
def test_paths_of_a_class_of_numerics_compute_the_same_bits(
    base: Path, tmp_path: Path, available: Callable[..., list[KernelPath]], dtype: torch.dtype, close: float
) -> None:
    """Paths of a numerics class compute the same bits, and every path computes the same as plain PyTorch in
    float32."""
    library = kernels()
    if library is None:
        pytest.skip("no kernels on this machine")
    adapters = [write_adapter(tmp_path / f"a{seed}", base, rank=5 + seed, seed=seed) for seed in range(3)]
    reference = loaded_model(base, max_loras=3, backend="reference")
    scores = [prompt_scores(reference, name) for name in ("", *added(reference, *adapters))]
    first: dict[str, list[list[tuple[int, float | None]]]] = {}
    for path in available(ThreadPool(library, 1), dtype):
        settings = {"dtype": str(dtype).removeprefix("torch."), "kernel_path": name_of(path)}
        loaded = loaded_model(base, max_loras=3, backend="native", **settings)
        names = ["", *added(loaded, *adapters)]
        for name, expected in zip(names, scores, strict=True):
            assert (prompt_scores(loaded, name) - expected).abs().mean() < close
        outputs = sampled(loaded, tasks_of(names), 4)
        assert outputs == first.setdefault(numerics_of(path), outputs), path


def test_the_number_of_threads_changes_nothing(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, rank=40)
    results = []
    for threads in (1, 2):
        loaded = loaded_model(base, max_loras=1, threads=threads, backend="native")
        results.append(sampled(loaded, tasks_of(added(loaded, adapter) * 6), 4))
    assert results[0] == results[1]


def test_limits_on_number_rank_and_bytes(base: Path, tmp_path: Path) -> None:
    small, large = (write_adapter(tmp_path / f"r{rank}", base, rank=rank) for rank in (2, 9))
    loaded = loaded_model(base, max_loras=1, max_lora_rank=8)
    with pytest.raises(CheckpointError, match=r"r is 9, above .* raise --max-lora-rank \(now 8\)"):
        added(loaded, large)
    added(loaded, small)
    added(loaded, small)  # Already loaded: nothing happens.
    with pytest.raises(CheckpointError, match="1 adapters are loaded, which is the limit"):
        added(loaded, write_adapter(tmp_path / "other", base, rank=1))
    assert loaded.adapters is not None
    loaded.adapters.unload(opened("", small).fingerprint)
    assert loaded.adapters.nbytes == 0
    added(loaded, write_adapter(tmp_path / "another", base, rank=1))
    with pytest.raises(CheckpointError, match="raise --max-lora-bytes"):
        added(loaded_model(base, max_loras=2, max_lora_bytes=1000), small)


def test_memory_for_adapters_is_taken_from_the_kv_pool(base: Path) -> None:
    sizes = {"num_blocks": None, "max_num_seqs": 4096}
    plain, reserving = (
        loaded_model(base, **sizes, max_loras=count, max_lora_bytes=1 << 30 if count else None)
        for count in (0, 1)
    )
    assert plain.kv_cache_bytes >= reserving.kv_cache_bytes
    with pytest.raises(CheckpointError, match=r"reserve .* for adapters"):
        loaded_model(base, max_loras=1, max_lora_bytes=1 << 50)


def test_files_that_change_are_noticed(base: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", base)
    adapter = opened("a", folder)
    write_adapter(folder, base, seed=1)
    loaded = loaded_model(base, max_loras=1)
    assert loaded.adapters is not None
    with pytest.raises(CheckpointError, match="have changed"):
        loaded.adapters.load(adapter.fingerprint, adapter.path)
    assert opened("a", folder).fingerprint != adapter.fingerprint


def test_a_gpu_refuses_adapters_by_name(base: Path) -> None:
    with pytest.raises(CheckpointError, match="LoRA adapters are not computed on a GPU yet"):
        loaded_model(base, backend="device", max_loras=1)
