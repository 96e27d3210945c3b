"""Executors of small checkpoints, prompts and random token trees."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from streamserve.contracts.plan import Executor
from streamserve.contracts.tree import TokenTree
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.sampling import SamplingParams
from tests.execution.drive import BLOCK_SIZE, NUM_BLOCKS

VOCAB = 320
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=17)
PENALIZED = SamplingParams(
    temperature=1.2, seed=3, repetition_penalty=1.4, presence_penalty=0.4, frequency_penalty=0.3, min_p=0.02
)
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "penalized": PENALIZED}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, length).tolist()


def loaded_from(folder: Path, backend: str = "auto") -> Loaded:
    return load(
        ModelConfig(
            path=str(folder), threads=1, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, backend=backend
        )
    )


def executor_of(folder: Path, backend: str = "auto") -> Executor:
    return loaded_from(folder, backend).executor


def random_trees(expected_text: list[int], seed: int, size: int = 7) -> Callable[[int, int], TokenTree]:
    """Return trees in which about half of the draft tokens are right: a random node gets the right token, or
    another one."""
    rng = np.random.default_rng(seed)

    def draft(token: int, done: int) -> TokenTree:
        tokens, parents, depths = [token], [-1], [0]
        for _ in range(size):
            parent = int(rng.integers(max(0, len(tokens) - 3), len(tokens)))
            index = done + depths[parent]
            right = rng.random() < 0.6 and index < len(expected_text)
            tokens.append(expected_text[index] if right else int(rng.integers(VOCAB)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens), (1.0,) * len(tokens))

    return draft
