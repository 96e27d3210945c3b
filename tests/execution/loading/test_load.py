"""Loading chooses dtype, pool and context length, and names the flag to change if they are impossible."""

import errno

import pytest
import torch

from streamserve.execution.backends.native.library import kernels
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.quantization import parse_format
from streamserve.execution.loading.load import load
from streamserve.execution.model.linear import packs
from streamserve.execution.model.shapes import layer_matrices, matrix_bytes
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.system.processors import usable_processors


def config(**fields) -> ModelConfig:
    return ModelConfig(**{"path": "somewhere", "threads": 1, "block_size": 16, "max_num_seqs": 4, **fields})


BACKENDS = ["native", "reference"] if kernels() else ["reference"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loaded_model_describes_itself(shared_checkpoint, backend):
    folder = shared_checkpoint("qwen2", "bfloat16", eos_token_id=[3, 5])
    limits = {"num_blocks": 50, "max_model_len": 300, "max_chunk": 64, "preempt_every": 7}
    loaded = load(config(path=str(folder), backend=backend, **limits))
    info, limits = loaded.model_info, loaded.engine_config
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert (info.architecture, info.vocab_size, info.dtype) == ("Qwen2ForCausalLM", 320, "bfloat16")
    assert info.eos_token_ids == (3, 5)
    assert info.max_model_len == limits.max_model_len == 300
    assert info.weight_bytes == 2 * info.parameters
    assert 0 <= stored - info.weight_bytes < 10_000  # The rest is the file's header.
    assert info.row_invariant == (backend == "native")
    assert (limits.num_blocks, limits.max_num_seqs, limits.max_chunk, limits.preempt_every) == (50, 4, 64, 7)
    assert loaded.kv_cache_bytes == 50 * 16 * 2 * 2 * 2 * 16 * 2  # slots, layers, k and v, heads, dim, bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_that_yarn_stretches_is_served(shared_checkpoint, backend):
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    folder = str(shared_checkpoint("qwen3", rope_parameters=yarn))
    assert load(config(path=folder, backend=backend)).model_info.max_model_len == 2048


def test_a_tied_head_is_held_once_unless_torch_packs_it(shared_checkpoint):
    folder = str(shared_checkpoint(tie_word_embeddings=True))
    for backend, dtype, size, packed in [
        ("reference", "float32", 4, False),
        ("reference", "bfloat16", 2, packs(torch.bfloat16)),
        *[("native", "float32", 4, False), ("native", "bfloat16", 2, False)][: 2 * len(BACKENDS) - 2],
    ]:
        loaded = load(config(path=folder, num_blocks=50, backend=backend, dtype=dtype))
        info = loaded.model_info
        assert len(loaded.model.embedding) == (0 if backend == "native" else 320)
        assert info.weight_bytes == size * (info.parameters + packed * 320 * 64)


@pytest.mark.parametrize(
    ("stored", "requested", "computed"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float32"),
        ("float16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_auto_computes_in_a_dtype_that_holds_the_weights_exactly(
    shared_checkpoint, stored, requested, computed
):
    loaded = load(config(path=str(shared_checkpoint(dtype=stored)), num_blocks=50, dtype=requested))
    assert loaded.model_info.dtype == computed


def test_float16_arithmetic_is_refused_with_the_way_out(shared_checkpoint):
    with pytest.raises(CheckpointError, match=r"--dtype float16.*float32"):
        load(config(path=str(shared_checkpoint()), dtype="float16"))


def test_fingerprints_differ_by_weights_and_by_the_dtype_computed_in(shared_checkpoint):
    first, other = str(shared_checkpoint()), str(shared_checkpoint(seed=1))
    prints = [
        load(config(path=path, num_blocks=50, dtype=dtype)).model_info.fingerprint
        for path, dtype in [(first, "auto"), (first, "float32"), (first, "bfloat16"), (other, "auto")]
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("threads", [0, 1])
def test_threads_are_those_requested_or_all_available(shared_checkpoint, threads):
    load(config(path=str(shared_checkpoint()), num_blocks=50, threads=threads, backend="reference"))
    assert torch.get_num_threads() == (threads or usable_processors().threads)


def test_threads_that_the_system_refuses_are_one_clear_line(shared_checkpoint, monkeypatch):
    if "native" not in BACKENDS:
        pytest.skip("there is no compiler")

    def refuse(*_):
        raise OSError(errno.EAGAIN, "the system refuses 2 threads for the kernels: no more of them")

    monkeypatch.setattr("streamserve.execution.loading.load.ThreadPool", refuse)
    with pytest.raises(CheckpointError, match=r"refuses 2 threads .*: lower --threads"):
        load(config(path=str(shared_checkpoint()), num_blocks=50, threads=2, backend="native"))


def test_with_the_kernels_torch_has_one_thread(shared_checkpoint):
    if "native" not in BACKENDS:
        pytest.skip("there is no compiler")
    load(config(path=str(shared_checkpoint()), num_blocks=50, threads=2, backend="native"))
    assert torch.get_num_threads() == 1


def test_backend_native_requires_kernels(shared_checkpoint, monkeypatch):
    monkeypatch.setattr("streamserve.execution.loading.load.kernels", lambda: None)
    with pytest.raises(CheckpointError, match="--backend native"):
        load(config(path=str(shared_checkpoint()), backend="native"))
    assert not load(config(path=str(shared_checkpoint()), num_blocks=50)).model_info.row_invariant


def test_a_broken_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(config(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("free", "fields", "reason"),
    [(1000, {}, "weights need"), (10**9, {"max_model_len": 513}, "--max-model-len 513")],
)
def test_what_cannot_fit_is_refused_before_any_tensor_is_loaded(
    shared_checkpoint, monkeypatch, free, fields, reason
):
    folder = str(shared_checkpoint())
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("a tensor was loaded"))
    monkeypatch.setattr("streamserve.execution.loading.load.available_bytes", lambda: free)
    with pytest.raises(CheckpointError, match=reason):
        load(config(path=folder, **fields))


@pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")
@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8), ("int4:32", 4), ("int4", 4)])
def test_weights_are_rounded_while_they_are_loaded(shared_checkpoint, quantization, bits):
    folder = shared_checkpoint("llama", "bfloat16", hidden_size=256, intermediate_size=512)
    plain, rounded = (load(config(path=str(folder), quantization=name)) for name in ("none", quantization))
    layer = rounded.model.layers[0]
    assert layer.qkv.format == f"int{bits}"
    assert rounded.model.head.format == "int8"
    assert rounded.model_info.fingerprint != plain.model_info.fingerprint
    assert rounded.model_info.precision.startswith("bfloat16, layers in int")
    matrices = [
        getattr(one, name) for one in rounded.model.layers for name in ("qkv", "out", "gate_up", "down")
    ]
    stored = sum(matrix.nbytes for matrix in matrices)
    format = parse_format(quantization)
    assert stored == matrix_bytes(rounded.model.spec, 2, format)
    saved = plain.model_info.weight_bytes - rounded.model_info.weight_bytes
    head = 2 * rounded.model.head.out_features * rounded.model.head.in_features - rounded.model.head.nbytes
    assert saved == 2 * layer_matrices(rounded.model.spec) - stored + head


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("draft", ["none", "model"])
def test_a_pool_of_8_bits_holds_more_blocks_in_the_same_memory(shared_checkpoint, backend, draft):
    """A pool of 8-bit KV has more blocks in the same memory. Scales are stored in the blocks, and the draft
    model's KV has 8 bits too."""
    folder = str(shared_checkpoint("llama", "bfloat16", head_dim=64))
    settings = {"path": folder, "backend": backend, "kv_cache_bytes": 1 << 22, "swap_space": 0.001}
    settings |= {"draft": folder} if draft == "model" else {}
    plain, quantized = (load(config(**settings, kv_cache_dtype=kv)) for kv in ("auto", "int8"))
    per_block = [loaded.kv_cache_bytes // loaded.engine_config.num_blocks for loaded in (plain, quantized)]
    assert per_block[1] * 128 == per_block[0] * 68
    assert quantized.kv_cache_bytes == sum(cache.data.nbytes for cache in quantized.caches) <= 1 << 22
    assert [cache.quantized for cache in quantized.caches] == [True] * (2 if draft == "model" else 1)
    for before, after in [
        (plain.engine_config.num_blocks, quantized.engine_config.num_blocks),
        (plain.engine_config.swap_blocks, quantized.engine_config.swap_blocks),
    ]:
        assert after == pytest.approx(before * 128 / 68, rel=0.02)
    assert quantized.model_info.fingerprint != plain.model_info.fingerprint
    assert (quantized.draft_fingerprint == plain.draft_fingerprint) == (draft == "none")
    assert plain.model_info.precision == "bfloat16"
    assert quantized.model_info.precision == "bfloat16, KV cache in int8"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization": "int5"}, "--quantization 'int5'"),
        ({"quantization": "int8", "backend": "reference"}, "--backend native"),
    ],
)
def test_what_cannot_be_rounded_is_refused(shared_checkpoint, settings, named):
    with pytest.raises(CheckpointError, match=named):
        load(config(path=str(shared_checkpoint()), **settings))
