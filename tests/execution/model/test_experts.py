"""For mixtures of experts: the experts that a row is sent to, how their weights are stored, and how much of
them a step is expected to read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamserve.contracts.plan import Span
from streamserve.contracts.tree import root
from streamserve.execution.backends.native.library import ThreadPool, kernels
from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import SINGLE, Checkpoint
from streamserve.execution.formats.quantization import HEAD_FORMAT
from streamserve.execution.formats.stored.export import export
from streamserve.execution.loading.load import load, make_attention
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.model.experts import Experts
from streamserve.execution.model.layout import lay_out
from streamserve.execution.model.mixture import choose
from streamserve.execution.model.shapes import head_bytes, layer_matrices, matrix_bytes, matrix_shapes
from streamserve.execution.model.spec import read_spec
from streamserve.execution.profile.floor import step_floor
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from tests.execution.backends.native.forwarding import logits_of
from tests.execution.compressing import stored_format
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS
from tests.execution.storing import CASES, dense_of, weights_of, write
from tests.execution.variants import TEXT, logits_by_transformers
from tests.ggufs import write_gguf

Shared = Callable[..., Path]
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no kernels on this machine")

MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256, "hidden_size": 128,
    },
    "qwen3_moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "hidden_size": 128,
        "head_dim": 32,
    },
    "mixtral": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 128, "intermediate_size": 256,
    },
    "glm4_moe": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "hidden_size": 128,
        "head_dim": 32, "n_shared_experts": 2, "first_k_dense_replace": 0,
    },
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> ThreadPool:
    library = kernels()
    if library is None:
        pytest.skip("no kernels on this machine")
    return ThreadPool(library, 2)


def config(folder: Path, **fields: Any) -> ModelConfig:
    limits = {"threads": 1, "num_blocks": NUM_BLOCKS, **fields}
    return ModelConfig(path=str(folder), block_size=BLOCK_SIZE, **limits)


def changed(source: Path, target: Path, **fields: Any) -> Path:
    """Return a copy of a checkpoint with other fields in its config."""
    shutil.copytree(source, target)
    content = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**content, **fields}))
    return target


def error_of(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the median row's error as a share of the logits' spread. In some rows another expert is
    chosen."""
    return float((logits - exact).square().mean(1).median().sqrt() / exact.std())


@given(st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=8), st.booleans())
def test_the_best_experts_are_chosen_and_of_equal_ones_the_first(rows: list[list[int]], normalized: bool):
    experts = Experts((0,), 5, 3, 8, normalized)
    chosen, weights = choose(torch.tensor(rows, dtype=torch.float32), experts)
    for row, numbers, shares in zip(rows, chosen.tolist(), weights, strict=True):
        assert numbers == sorted(range(5), key=lambda number: (-row[number], number))[:3]
        exact = torch.tensor(row, dtype=torch.float64).softmax(0)[numbers]
        exact = exact / exact.sum() if normalized else exact
        torch.testing.assert_close(shares.double(), exact, rtol=1e-6, atol=0)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=8),
    st.lists(st.integers(-1, 1), min_size=6, max_size=6),
    st.booleans(),
)
def test_a_correction_changes_the_choice_and_not_the_weights(
    rows: list[list[int]], corrections: list[int], normalized: bool
):
    experts = Experts((0,), 6, 2, 8, normalized, sigmoid=True, groups=3, chosen_groups=2, scale=2.5)
    scores, correction = torch.tensor(rows, dtype=torch.float32), torch.tensor(corrections) / 8
    chosen, weights = choose(scores, experts, correction)
    for row, numbers, shares in zip(scores.sigmoid(), chosen.tolist(), weights, strict=True):
        ranked = (row + correction).tolist()
        sums = (row + correction).view(3, 2).sum(1).tolist()
        groups = sorted(range(3), key=lambda group: (-sums[group], group))[:2]
        allowed = [number for group in sorted(groups) for number in (2 * group, 2 * group + 1)]
        assert numbers == sorted(allowed, key=lambda number: (-ranked[number], number))[:2]
        exact = row.double()[numbers]
        exact = 2.5 * (exact / exact.sum() if normalized else exact)
        torch.testing.assert_close(shares.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("twin", [(0, 3), (3, 5)])
def test_of_experts_with_equal_scores_the_lower_number_computes(
    shared_checkpoint: Shared, tmp_path: Path, pool: ThreadPool, twin: tuple[int, int]
) -> None:
    """Of experts with equal scores, the one with the lower number computes: two experts have the same row in
    the router, and every token is sent to one expert."""
    fields = {**MIXTURES["qwen3_moe"], "num_experts_per_tok": 1, "num_hidden_layers": 1}
    source = shared_checkpoint("qwen3_moe", **fields)
    folders = {name: tmp_path / name for name in ("both", "without the lower", "without the higher")}
    for name, folder in folders.items():
        shutil.copytree(source, folder)
        tensors = load_file(folder / SINGLE)
        router = tensors["model.layers.0.mlp.gate.weight"]
        router[twin[1]] = router[twin[0]]
        out = {"without the lower": twin[0], "without the higher": twin[1]}.get(name)
        if out is not None:
            tensors[f"model.layers.0.mlp.experts.{out}.down_proj.weight"].zero_()
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})

    def logits(name: str) -> torch.Tensor:
        return logits_of(folders[name], [60], torch.float32, pool)

    both = logits("both")
    assert torch.equal(logits("without the higher"), both)
    assert not torch.equal(logits("without the lower"), both)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than the 6 experts"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_local_experts": 5000}, "num_local_experts must be at most 1024, not 5000"),
        (
            {"num_local_experts": 1000, "num_hidden_layers": 101},
            "num_local_experts 1000 in 101 layers: at most 100000",
        ),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers must be a list of layers, not [0.5]"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer, not 0"),
        ({"mlp_only_layers": [1]}, "model.layers.1.mlp.gate_proj.weight"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "'mxfp4' is not supported with this architecture",
        ),
    ],
)
def test_a_mixture_that_is_not_as_the_config_says_is_refused(
    shared_checkpoint: Shared, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    folder = changed(shared_checkpoint("qwen3_moe", **MIXTURES["qwen3_moe"]), tmp_path / "folder", **fields)
    with pytest.raises(CheckpointError) as error:
        load(config(folder))
    assert reason in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_gpt_oss_without_rope_parameters_is_refused(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("gpt_oss", **GPT_OSS)
    folder = changed(source, tmp_path / "folder", rope_parameters=None)
    with pytest.raises(CheckpointError, match="rope_scaling is missing"):
        load(config(folder))


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("architecture", [*MIXTURES, "qwen3_vl_moe", "gpt_oss"])
@pytest.mark.parametrize("quantization", ["int8:32", "int4:32", "w8a8"])
def test_experts_are_rounded_while_they_are_loaded_and_routers_are_not(
    shared_checkpoint: Shared, architecture: str, quantization: str
) -> None:
    fields = MIXTURES.get(architecture, GPT_OSS)
    if architecture == "qwen3_vl_moe":
        fields = MIXTURES["qwen3_moe"] | {"tie_word_embeddings": False}
    folder = shared_checkpoint(architecture, "bfloat16", **fields)
    plain, rounded = (load(config(folder, quantization=name)) for name in ("none", quantization))
    spec, held = rounded.model.spec, 0
    for layer in rounded.model.layers:
        assert layer.experts
        assert layer.experts.router.format == "f32"  # type: ignore[attr-defined]
        assert len(layer.experts.down) == len(layer.experts.gate_up)
        for linear in (layer.qkv, layer.out, *layer.experts.gate_up, *layer.experts.down):
            assert linear.format == ("int4" if quantization == "int4:32" else "int8")  # type: ignore[attr-defined]
            held += linear.nbytes  # type: ignore[attr-defined]
    padding = held - matrix_bytes(spec, 2, rounded.format)
    assert padding == 0 or architecture == "gpt_oss"  # The 96 inputs are padded to 128.
    saved = plain.model_info.weight_bytes - rounded.model_info.weight_bytes
    assert rounded.head == HEAD_FORMAT
    head = head_bytes(spec, 2) - head_bytes(spec, 2, rounded.head)
    assert saved == 2 * layer_matrices(spec) - matrix_bytes(spec, 2, rounded.format) + head


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize(
    "case",
    [
        "gptq by activation", "awq, groups of 64", "fp8 in blocks", "compressed-tensors by activation",
        "gptq of 8 bits",
    ],
)  # fmt: skip
def test_experts_of_quantized_checkpoints_are_those_of_the_layout(
    shared_checkpoint: Shared, tmp_path: Path, pool: ThreadPool, case: str, architecture: str
) -> None:
    source = shared_checkpoint(architecture, "bfloat16", **MIXTURES[architecture])
    folder = write(source, tmp_path / "folder", *CASES[case])
    spec, checkpoint, expected = read_spec(folder), Checkpoint(folder), weights_of(folder)
    check_weights(checkpoint, spec)
    assert matrix_shapes(spec).keys() == expected.keys()
    for module, shape in matrix_shapes(spec).items():
        weight = stored_format(spec, module).read(checkpoint, module, shape).whole()
        assert torch.equal(weight.floats(), expected[module])
    exact = logits_of(dense_of(folder), [60], torch.float32, pool)
    logits = logits_of(folder, [60], torch.float32, pool)
    assert error_of(logits, exact) < (1e-5 if "fp8" in case else 0.05)
    assert torch.equal(logits_of(folder, [13, 1, 1, 30, 15], torch.float32, pool), logits)


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize("format", ["int4:32", "w8a8"])
def test_a_quantized_folder_is_what_is_quantized_at_load(
    shared_checkpoint: Shared, tmp_path: Path, architecture: str, format: str
) -> None:
    source = shared_checkpoint(architecture, "bfloat16", **MIXTURES[architecture])
    export(source, tmp_path / "folder", load(config(source, quantization=format)).format)  # type: ignore[arg-type]
    ignored = json.loads((tmp_path / "folder/config.json").read_text())["quantization_config"]["ignore"]
    assert sum(".gate" in name for name in ignored) == 2
    folder, text = tmp_path / "folder", list(range(4, 64))
    ours, original = load(config(folder, head_quantization="int8")), load(config(source, quantization=format))
    expected = states(original, [text], [60])
    assert torch.equal(states(ours, [text], [60]), expected)
    assert torch.equal(ours.model.head(expected), original.model.head(expected))


def states(loaded: Loaded, texts: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Return the hidden states of the first text, computed in steps of these sizes. The other texts are in
    its first step."""
    attention = make_attention(loaded.cache, loaded.model.spec, loaded.pool)
    (text, *others), pieces, start = texts, [], 0
    blocks = list(range(-(-len(text) // BLOCK_SIZE)))
    for size in sizes:
        spans = [Span(0, start, text[start : start + size], blocks)]
        if not start:
            spans += [Span(n, 0, other, [len(blocks) + n]) for n, other in enumerate(others, start=1)]
        layout = lay_out(spans, BLOCK_SIZE)
        attention.plan(layout)
        tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
        pieces.append(loaded.model.forward(tokens, positions, attention)[:size])
        start += size
    return torch.cat(pieces)


def test_stacked_experts_are_not_written_quantized(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("gpt_oss", **GPT_OSS)
    with pytest.raises(CheckpointError, match="use --quantization when serving"):
        export(source, tmp_path / "folder", load(config(source, quantization="int8:32")).format)  # type: ignore[arg-type]
    assert not (tmp_path / "folder").exists()


def mxfp4(source: Path, target: Path, **config: Any) -> Path:
    """Write a checkpoint of gpt-oss with random blocks for its experts' matrices, and to `dense_of(target)` a
    checkpoint with the matrices that transformers makes of these blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    shutil.copytree(source, target)
    shutil.copytree(source, dense_of(target))
    tensors = load_file(source / SINGLE)
    dense = dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, target / SINGLE, metadata={"format": "pt"})
    save_file(dense, dense_of(target) / SINGLE, metadata={"format": "pt"})
    content = json.loads((target / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        **config,
    }
    (target / "config.json").write_text(json.dumps(content))
    return target


@needs_kernels
def test_experts_in_mxfp4_are_those_that_transformers_unpacks(
    shared_checkpoint: Shared, tmp_path: Path, pool: ThreadPool
) -> None:
    folder = mxfp4(shared_checkpoint("gpt_oss", **GPT_OSS), tmp_path / "folder")
    spec, checkpoint = read_spec(folder), Checkpoint(folder)
    check_weights(checkpoint, spec)
    dense = load_file(dense_of(folder) / SINGLE)
    for module, shape in matrix_shapes(spec).items():
        if ".experts." not in module:
            assert spec.stored is not None
            assert spec.stored.of(module) is None
            continue
        weight = stored_format(spec, module).read(checkpoint, module, shape).whole().floats()
        name, number, part = module.rsplit(".", 2)
        expected = dense[f"{name}.{part}"][int(number)].T
        gates = [expected[::2], expected[1::2]] if part == "gate_up_proj" else [expected]
        assert torch.equal(weight, torch.cat(gates))
    exact = logits_by_transformers(dense_of(folder))
    logits = logits_of(folder, [60], torch.float32, pool)
    assert 1e-4 < error_of(logits, exact) < 0.03
    assert torch.equal(logits_of(folder, [13, 1, 1, 30, 15], torch.float32, pool), logits)
    loaded = load(config(folder))
    assert loaded.model_info.precision == "float32, layers in mxfp4:32, unquantized"
    write_gguf(folder, tmp_path / "model.gguf")
    from_file = load(config(tmp_path / "model.gguf", dtype="float32"))
    assert from_file.model_info.precision == loaded.model_info.precision
    text = TEXT[0].tolist()
    assert torch.equal(states(from_file, [text], [60]), states(loaded, [text], [60]))
    experts: Any = loaded.model.layers[0].experts
    scales_and_table = 64 * 4 + 16
    assert experts.down[0].nbytes == 64 * 128 // 2 + scales_and_table  # 96 inputs, padded
    rounded = load(config(folder, head_quantization="int8"))
    assert rounded.model_info.precision == "float32, layers in mxfp4:32, unquantized, head in int8:128"
    states_of_some = torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(4))
    plain = load(config(folder)).model.head(states_of_some)
    assert 1e-4 < error_of(rounded.model.head(states_of_some), plain) < 0.03


def test_mxfp4_that_cannot_be_read_is_refused(shared_checkpoint: Shared, tmp_path: Path) -> None:
    source = shared_checkpoint("gpt_oss", **GPT_OSS)
    folder = mxfp4(source, tmp_path / "experts", modules_to_not_convert=["model.layers.0.mlp.experts"])
    with pytest.raises(CheckpointError, match=r"modules_to_not_convert .* experts are quantized"):
        load(config(folder))
    folder = mxfp4(source, tmp_path / "scales")
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5] = 255
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"down_proj_scales holds scales of weights that float32 cannot"
    ):
        load(config(folder))
    folder = changed(source, tmp_path / "awq", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(CheckpointError, match="'awq' is not supported with this architecture"):
        load(config(folder))


@needs_kernels
@pytest.mark.parametrize("architecture", [*MIXTURES, "gpt_oss"])
def test_a_step_is_expected_to_read_the_experts_that_its_tokens_choose(
    shared_checkpoint: Shared, architecture: str
) -> None:
    loaded = load(config(shared_checkpoint(architecture, "bfloat16", **MIXTURES.get(architecture, GPT_OSS))))
    experts, floor = loaded.model.spec.experts, step_floor(loaded, 1.0, 1.0)
    assert experts
    assert experts.share_read(0) == 0
    assert experts.share_read(1) == pytest.approx(experts.chosen / experts.count)
    assert experts.share_read(10_000) == pytest.approx(1)

    def work(tokens: int) -> tuple[int, int]:
        one = floor.work([Span(0, 0, [1] * tokens, list(range(tokens)), root(1), (0,))])
        kv = 2 * tokens * 2 * 2 * loaded.model.spec.num_kv_heads * loaded.model.spec.head_dim
        return one.bytes - kv, one.operations

    head, routed = 2 * floor.head_parameters, 0
    for module, (rows, columns) in matrix_shapes(loaded.model.spec).items():
        routed += 2 * rows * columns * (".experts." in module)
    share = experts.chosen / experts.count
    assert work(1)[0] == pytest.approx(floor.layer_bytes + head - routed * (1 - share), abs=1)
    assert work(40)[0] == pytest.approx(floor.layer_bytes + head, rel=1e-3)
    assert floor.token_parameters == pytest.approx(floor.layer_parameters - routed / 2 * (1 - share), abs=1)


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [*MIXTURES, "gpt_oss"])
def test_rows_do_not_depend_on_how_many_share_their_experts(
    shared_checkpoint: Shared, architecture: str, dtype: str
) -> None:
    """Rows do not depend on the number of rows that share an expert: alone, and with more rows than a group
    has, with one thread and with two."""
    folder = shared_checkpoint(
        architecture, "bfloat16", max_position_embeddings=2048, **MIXTURES.get(architecture, GPT_OSS)
    )
    text = torch.randint(4, 320, (1100,), generator=torch.Generator().manual_seed(5)).tolist()
    hidden = []
    for threads, sizes in ((2, [1100]), (1, [17, 1, 1023, 59])):
        loaded = load(config(folder, dtype=dtype, threads=threads, num_blocks=280))
        hidden.append(states(loaded, [text], sizes))
    assert torch.equal(*hidden)
    assert bool(torch.isfinite(hidden[0]).all())


@needs_kernels
@pytest.mark.parametrize("quantization", ["none", "int8:32"])
def test_a_row_that_is_not_finite_changes_no_other(
    shared_checkpoint: Shared, tmp_path: Path, quantization: str
) -> None:
    source, folder = shared_checkpoint("qwen2_moe", **MIXTURES["qwen2_moe"]), tmp_path / "folder"
    shutil.copytree(source, folder)
    tensors = load_file(folder / SINGLE)
    tensors["model.layers.0.mlp.experts.1.down_proj.weight"] *= 1e30
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] *= 1e30
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    loaded = load(config(folder, quantization=quantization))
    alone = [states(loaded, [[token]], [1]) for token in range(4, 34)]
    finite = [bool(torch.isfinite(row).all()) for row in alone]
    assert 5 < sum(finite) < 25  # the rows that do not choose the expert whose numbers overflow
    first, *others = ([token] for token, own in zip(range(4, 34), finite, strict=True) if own)
    poisoned = [[token] for token, own in zip(range(4, 34), finite, strict=True) if not own]
    assert torch.equal(states(loaded, [first, *poisoned, *others], [1]), alone[first[0] - 4])
