from pathlib import Path
from typing import Any

import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.text.folders import byte_level_folder, sentencepiece_folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("byte-level"))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def bpe(byte_level: Path) -> Tokenizer:
    """A tokenizer whose tokens are bytes of UTF-8."""
    return Tokenizer.from_folder(byte_level)


@pytest.fixture(scope="session")
def spm(sentencepiece: Path) -> Tokenizer:
    """A tokenizer with spaces inside of tokens and byte fallback."""
    return Tokenizer.from_folder(sentencepiece)


@pytest.fixture(scope="session")
def reference(byte_level: Path) -> Any:
    """transformers' tokenizer for `bpe`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(byte_level)
