"""Workloads: prompts and output lengths, generated or read from a file."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamserve.extras.bench.errors import BenchError

CHARACTERS_PER_TOKEN = 4
"""A rule of thumb, used if an output's length is known as text only."""

_COMMON = """the of and to in is that it was for on are with as his they at be this from have or by one had
not but what all were when we there can an your which their said if do will each about how up out them then
she many some so these would other into has more her two like him see time could no make than first been"""
_WORDS = tuple(_COMMON.split())
"""Common English words. Most tokenizers have a single token for most of them."""


@dataclass(frozen=True)
class WorkloadPrompt:
    """A prompt. `content` is a text, token ids, or the messages of a chat.

    `output_tokens` is the number of tokens to request.
    """

    content: str | tuple[int, ...] | tuple[dict[str, Any], ...]
    output_tokens: int


@dataclass(frozen=True)
class RandomLengths:
    """Lengths in tokens. Each is drawn uniformly from length × (1 ± range_ratio)."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if min(self.input_len, self.output_len) < 1:
            raise BenchError("random lengths must be at least 1")
        if not 0 <= self.range_ratio < 1:
            raise BenchError(f"the range ratio is {self.range_ratio}; it must be at least 0 and below 1")

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Draw an input and an output length for each of `count` requests."""
        inputs = self._draw(self.input_len, count, rng)
        return list(zip(inputs, self._draw(self.output_len, count, rng), strict=True))

    def _draw(self, length: int, count: int, rng: np.random.Generator) -> list[int]:
        low = max(1, math.floor(length * (1 - self.range_ratio)))
        high = math.ceil(length * (1 + self.range_ratio))
        return [int(n) for n in rng.integers(low, high + 1, count)]


def random_tokens(
    count: int, lengths: RandomLengths, vocab_size: int, rng: np.random.Generator
) -> list[WorkloadPrompt]:
    """Return prompts of token ids below `vocab_size`, with exact lengths and no common prefixes."""
    return [
        WorkloadPrompt(tuple(int(token) for token in rng.integers(0, vocab_size, inputs)), outputs)
        for inputs, outputs in lengths.draw(count, rng)
    ]


def random_words(count: int, lengths: RandomLengths, rng: np.random.Generator) -> list[WorkloadPrompt]:
    """Return prompts of common words, one word per requested token. Their lengths in tokens are approximate;
    for routes that accept texts."""
    return [
        WorkloadPrompt(" ".join(rng.choice(_WORDS, inputs)), outputs)
        for inputs, outputs in lengths.draw(count, rng)
    ]


def sharegpt(
    path: Path, count: int, output_len: int | None, rng: np.random.Generator
) -> list[WorkloadPrompt]:
    """Return the first questions of `count` ShareGPT conversations in random order.

    Outputs have `output_len` tokens; None: the length of the recorded answer at four characters per token.
    Raises BenchError if the file is not in ShareGPT's format.
    """
    try:
        conversations = json.loads(path.read_bytes())
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in conversations]
        pairs = [(str(t[0]["value"]), str(t[1]["value"])) for t in turns if len(t) >= 2]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"{path} is not a file of ShareGPT conversations: {error!r}") from error
    usable = [(question, answer) for question, answer in pairs if question and answer]
    chosen = _choose(len(usable), count, path, rng)
    return [
        WorkloadPrompt(
            usable[index][0], output_len or math.ceil(len(usable[index][1]) / CHARACTERS_PER_TOKEN)
        )
        for index in chosen
    ]


def jsonl(path: Path, count: int, output_len: int, rng: np.random.Generator) -> list[WorkloadPrompt]:
    """Return the prompts of `count` lines in random order. Each line is {"prompt": text or token ids} or
    {"messages": [...]}.

    "output_tokens" in a line overrides `output_len`.
    """
    prompts = [_from_line(entry, output_len, where) for where, entry in read_lines(path)]
    return [prompts[index] for index in _choose(len(prompts), count, path, rng)]


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file with one JSON value per line, each with its location. Raises BenchError if
    the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:
                raise BenchError(f"{path}:{number} is not JSON: {error}") from error


def _from_line(entry: Any, output_len: int, where: str) -> WorkloadPrompt:
    match entry:
        case {"messages": [_, *_] as messages} if all(isinstance(m, dict) for m in messages):
            content: Any = tuple(messages)
        case {"prompt": str(text)} if text:
            content = text
        case {"prompt": [_, *_] as ids} if all(type(token) is int for token in ids):
            content = tuple(ids)
        case _:
            raise BenchError(
                f'{where} needs "prompt" (a text or token ids) or "messages" (a list of objects)'
            )
    output_tokens = entry.get("output_tokens", output_len)
    if type(output_tokens) is not int or output_tokens < 1:
        raise BenchError(f"{where}: output_tokens must be a whole number from 1, got {output_tokens!r}")
    return WorkloadPrompt(content, output_tokens)


def _choose(available: int, count: int, path: Path, rng: np.random.Generator) -> list[int]:
    """Choose `count` distinct entries.

    Raises BenchError if there are too few: repeated entries would measure the server's prefix cache.
    """
    if available < count:
        raise BenchError(
            f"{path} has {available} usable prompts: reduce --num-prompts to at most {available}"
        )
    return [int(index) for index in rng.permutation(available)[:count]]
