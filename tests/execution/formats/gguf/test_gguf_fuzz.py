"""Damaged GGUF files are refused in one line with bounded memory, or work."""

import os
import random
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamserve.execution.loading.load import load
from streamserve.gguf.header import MAX_STRINGS, read_header
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.text.chat import chat_template
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.ggufs import write_gguf

MAX_BYTES = 1 << 30
"""Address space in bytes, in addition to the process's own before a file is read."""

HOSTILE = (0, 1, 2, 3, 7, 8, 9, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
SPARSE = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    source = make_checkpoint(folder / "source", num_hidden_layers=1)
    for kind in ("F32", "Q8_0"):
        write_gguf(source, folder / f"{kind}.gguf", kind)
    for architecture, fields in (("gpt_oss", SPARSE), ("gemma3_text", {"head_dim": 16})):
        own = make_checkpoint(
            folder / architecture, architecture, num_hidden_layers=1, pad_token_id=0, **fields
        )
        write_gguf(own, folder / f"{architecture}.gguf", lambda name: "MXFP4" if "experts" in name else "F32")
    return sorted(folder.glob("*.gguf"))


@pytest.fixture(autouse=True)
def _bounded_memory(files: list[Path]) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def use(path: Path) -> str:
    """Load the model and its tokenizer; return the reason if it is refused, else None. Other errors are
    raised."""
    try:
        tokenizer = Tokenizer.from_folder(path)
        chat_template(tokenizer.chat_template, tokenizer.special_tokens)
        loaded = load(ModelConfig(path=str(path), threads=1, num_blocks=8, block_size=4))
    except CheckpointError as error:
        line = str(error)
        assert line.encode()
        assert len(line.splitlines()) == 1
        assert len(line) < 2000
        return line
    assert tokenizer.decode(tokenizer.encode("a b")) is not None
    loaded.executor.close()
    return ""


def header_size(path: Path) -> int:
    """Return the number of bytes before the data of the tensors."""
    data = path.read_bytes()
    return min(info.offset for info in read_header(path, data, len(data)).tensors.values())


def damaged(data: bytes, header: int, rng: random.Random) -> bytes:
    """Cut the file off, or overwrite numbers or bytes in its header."""
    if rng.random() < 0.1:
        return data[: rng.randrange(header)]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        # The beginning has the counts and the model's entries, and the end the tensors; most of the header is
        # tokens.
        at = rng.choice([rng.randrange(1000), rng.randrange(header), rng.randrange(header - 1200, header)])
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(HOSTILE) if rng.random() < 0.7 else rng.getrandbits(64)
        changed[at : at + size] = number.to_bytes(8, "little")[:size]
    return bytes(changed)


def test_a_damaged_file_is_refused_or_harmless(files: list[Path], tmp_path: Path, scale: Scale) -> None:
    rng, path, refused = random.Random(scale.seed), tmp_path / "model.gguf", 0
    contents = [(file.read_bytes(), header_size(file)) for file in files]
    count = scale.pick(300, 10_000)
    for _ in range(count):
        path.write_bytes(damaged(*rng.choice(contents), rng))
        refused += bool(use(path))
        path.unlink()  # The last model's mapping keeps the old file.
    assert count / 2 < refused < count


def test_undamaged_files_work(files: list[Path]) -> None:
    assert [use(file) for file in files] == [""] * 4


def test_a_file_may_end_nowhere(files: list[Path], tmp_path: Path) -> None:
    data, header = files[0].read_bytes(), header_size(files[0])
    path = tmp_path / "model.gguf"
    for size in [*range(60), *range(60, header, header // 40), header, len(data) - 1]:
        path.write_bytes(data[:size])
        assert use(path), size
        path.unlink()


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def file(
    entries: bytes = b"", count: int = 0, tensors: bytes = b"", tensor_count: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, count) + entries + tensors


def tensor(name: str, *sizes: int, kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + shape + struct.pack("<IQ", kind, offset)


STRING, ARRAY = struct.pack("<I", 8), struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cannot be read"),
        (b"GGML" + bytes(100), "is not a GGUF file"),
        (file(version=1), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version of big-endian numbers is not supported"),
        (file(count=2**63), f"has {2**63} entries"),
        (file(tensor_count=2**40), f"has {2**40} tensors"),
        (file(struct.pack("<Q", 2**62), 1), f"has {2**62} bytes in a string"),
        (file(string("a") + STRING + struct.pack("<Q", 2**25), 1), "the header ends after"),
        (file(string("a") + ARRAY + struct.pack("<IQ", 8, 2**60), 1), f"has {2**60} items in an array"),
        (file(string("a") + ARRAY + struct.pack("<IQ", 8, MAX_STRINGS + 1), 1), "strings in arrays"),
        (file(string("a") + ARRAY + struct.pack("<IQ", 4, 2**26), 1), "the header ends after"),
        (file(string("a") + ARRAY + struct.pack("<IQ", 9, 1), 1), "unknown type 9"),
        (file(string("a") + struct.pack("<I", 99), 1), "unknown type 99"),
        (file((string("a") + STRING + string("b")) * 2, 2), "entry 'a' appears twice"),
        (file(struct.pack("<Q", 2) + b"\xff\xfe", 1), "not UTF-8"),
        (file(string("a\nb"), 1), "entry 'a\\nb' must have a name of printable ASCII"),
        (file(tensors=tensor("x", *[1] * 5), tensor_count=1), "5 dimensions"),
        (file(tensors=tensor("x", 2**63), tensor_count=1), "numbers in a dimension"),
        (file(tensors=tensor("x", *[2**31 - 1] * 4), tensor_count=1), "the file is not complete"),
        (file(tensors=tensor("x", 31, kind=8), tensor_count=1), "rows must be blocks of 32"),
        (file(tensors=tensor("x", 256, kind=16), tensor_count=1), "of type IQ2_XXS, which is not supported"),
        (file(tensors=tensor("x", 8, offset=7), tensor_count=1), "not at a multiple of 32"),
        (file(tensors=tensor("x", 8) + tensor("y", 8), tensor_count=2) + bytes(256), "'y' overlaps 'x'"),
        (
            file(string("general.alignment") + struct.pack("<II", 4, 0), 1),
            "general.alignment must be a multiple of 8",
        ),
    ],
)  # fmt: skip
def test_absurd_headers_are_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    assert reason in use(tmp_path / "model.gguf")
