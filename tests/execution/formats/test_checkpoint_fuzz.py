"""A checkpoint whose files were changed at random is refused by name, or is a working model: there is never a
traceback, a hang, or an allocation larger than its tensors need."""

import copy
import json
import os
import resource
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.plan import SequenceState, Span, StepPlan
from streamserve.contracts.tree import root
from streamserve.execution.formats.checkpoint import INDEX, SINGLE
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.sampling import RECOMMENDED, recommended_sampling
from streamserve.text.chat import chat_template
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint

MAX_BYTES = 3 << 30
"""Address space in bytes, in addition to the process's own before a checkpoint is read."""

HOSTILE: list[Any] = [
    0, 1, -1, 2, 3, 5, 64, 10**9, 2 * 10**9, 10**12, 2**31, 2**62, 2**63, 2**64, 10**30, 1.5, 2.0, 1e7, 1e308,
    1e-308, -0.0,
    float("nan"), float("inf"), True, False, None, "", "x", "4", "nan", "\ud800", "a\nb", "\0", "../x", ".",
    [], [1], [None], ["x"] * 3, {}, {"a": 1}, [[]], {"rope_type": "llama3"}, {"rope_type": "linear"},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1},
]  # fmt: skip

FIELDS = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
    "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling",
    "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype", "torch_dtype",
    "eos_token_id", "hidden_act", "quantization_config", "partial_rotary_factor",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders of checkpoints: one file, several files, and an architecture with windows."""
    base = tmp_path_factory.mktemp("checkpoints")
    single = make_checkpoint(base / "single")
    sharded = make_checkpoint(base / "sharded", max_shard_size="100KB")
    windows = make_checkpoint(base / "windows", "qwen2", use_sliding_window=True, sliding_window=8)
    return {"single": single, "sharded": sharded, "windows": windows}


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def use(folder: Path) -> bool:
    """Load the checkpoint and use it; return whether it was refused. Other errors are raised."""
    try:
        tokenizer = Tokenizer.from_folder(folder)
        chat_template(tokenizer.chat_template, tokenizer.special_tokens)
        recommended = recommended_sampling(folder)
        loaded = load(ModelConfig(path=str(folder), threads=1, num_blocks=8, block_size=4))
    except CheckpointError as error:
        line = str(error)
        assert line.encode()
        assert len(line.splitlines()) == 1
        assert len(line) < 2000
        return True
    assert tokenizer.decode(tokenizer.encode("a b")) is not None
    prompt, params = [1], SamplingParams(**{"temperature": 0.0, "seed": 1, **recommended})
    state = SequenceState(1, 0, params, prompt, [])
    span = Span(1, 0, prompt, [0], root(1), (0,))
    (result,) = loaded.executor.run(StepPlan(0, [state], [], [], [span])).spans
    assert result.not_finite or 0 <= result.outputs[0][0].token < loaded.model_info.vocab_size
    loaded.executor.close()
    return False


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the paths of the values in a JSON document; of long lists and tables only those at the
    beginning."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for count, (key, other) in enumerate(inner):
        if count < 40:
            yield (*at, key)
            yield from paths(other, (*at, key))


@st.composite
def changed_json(draw: st.DrawFn, document: Any, fields: tuple[str, ...]) -> bytes:
    """Return the document with one to three values replaced, removed or added."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        known = [*paths(document), *((field,) for field in fields)] or [("a",)]
        *above, key = draw(st.sampled_from(known))
        container = document
        for step in above:
            container = container[step]
        if draw(st.integers(0, 5)) == 0:
            if isinstance(container, list) or key in container:
                del container[key]
        else:
            container[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
    return json.dumps(document).encode()


def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the data cut short, or with some bytes overwritten."""
    if draw(st.booleans()):
        return data[: draw(st.integers(0, len(data)))]
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        changed[draw(st.integers(0, min(len(data), 4000) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


def change(draw: st.DrawFn, folder: Path, name: str) -> bytes:
    """Return the changed content of a file in the folder."""
    data = (folder / name).read_bytes()
    if draw(st.integers(0, 4)) == 0:
        return changed_bytes(draw, data)
    if name.endswith(".safetensors"):
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        written = draw(changed_json(header, ("__metadata__", "model.layers.7.x")))
        return struct.pack("<Q", len(written)) + written + data[8 + size :]
    fields = {"config.json": FIELDS, "generation_config.json": tuple(RECOMMENDED)}
    return draw(changed_json(json.loads(data), fields.get(name, ())))


FILES = [
    ("single", "config.json"),
    ("windows", "config.json"),
    ("single", "generation_config.json"),
    ("single", SINGLE),
    ("sharded", INDEX),
    ("single", "tokenizer.json"),
    ("single", "tokenizer_config.json"),
]


@pytest.mark.parametrize(("kind", "name"), FILES, ids=lambda value: value)
@given(data=st.data())
def test_a_changed_file_is_refused_or_harmless(folders, tmp_path_factory, kind, name, data):
    folder = tmp_path_factory.mktemp("changed")
    try:
        for file in folders[kind].iterdir():
            (folder / file.name).hardlink_to(file)
        (folder / name).unlink()
        (folder / name).write_bytes(data.draw(st.composite(change)(folders[kind], name)))
        use(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["single", "sharded", "windows"])
def test_unchanged_folders_work(folders, kind):
    assert use(folders[kind]) is False


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_nested_too_deeply_is_refused(folders, tmp_path, name):
    folder = Path(shutil.copytree(folders["single"], tmp_path / "deep"))
    (folder / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert use(folder)
