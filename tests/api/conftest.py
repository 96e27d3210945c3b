from collections.abc import Iterator
from pathlib import Path

import pytest

from streamserve.api.generator import Generator
from streamserve.api.settings import ApiSettings
from streamserve.llm.async_llm import AsyncLLM
from streamserve.settings.resolve import resolve
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Served, scripted, served
from tests.checkpoints import make_checkpoint
from tests.text.folders import byte_level_folder

CONTEXT = 4096


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose greedy texts are long and never the same twice in a row."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[Served]:
    """A server with the real engine. Requests are greedy and have no end token unless a test asks for
    something else."""

    async def start() -> Generator:
        names = ["tiny", "owner/tiny"]
        llm = AsyncLLM(
            resolve(str(checkpoint), {"served_model_name": names, "threads": 1, "num_blocks": 2048})
        )
        await llm.start()
        return llm

    with served(start, ApiSettings(default_sampling={"temperature": 0.0, "ignore_eos": True})) as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(server: Served) -> Tokenizer:
    result: Tokenizer = server.llm.tokenizer
    return result


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    """A generator that says hello. Tests may replace its script."""
    return ScriptedGenerator(Tokenizer.from_folder(byte_level_folder(tmp_path_factory.mktemp("scripted"))))


@pytest.fixture(scope="session")
def hello(generator: ScriptedGenerator) -> Iterator[Served]:
    """A server that runs the scripted generator."""
    with scripted(generator) as running:
        yield running


@pytest.fixture(scope="session")
def strict(generator: ScriptedGenerator) -> Iterator[Served]:
    """A server that runs the scripted generator and refuses fields that are unknown or without effect."""
    with scripted(generator, ApiSettings(strict_fields=True)) as running:
        yield running
