import json
from pathlib import Path

import numpy as np
import pytest

from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.workloads import (
    RandomLengths,
    WorkloadPrompt,
    jsonl,
    random_tokens,
    random_words,
    sharegpt,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_random_prompts_have_the_requested_lengths() -> None:
    prompts = random_tokens(50, RandomLengths(7, 3), 20, rng())
    assert {(len(prompt.content), prompt.output_tokens) for prompt in prompts} == {(7, 3)}
    tokens = {token for prompt in prompts for token in prompt.content}
    assert tokens == set(range(20))


def test_lengths_vary_within_their_range_and_reach_both_ends() -> None:
    drawn = RandomLengths(10, 4, range_ratio=0.5).draw(2000, rng())
    assert {inputs for inputs, _ in drawn} == set(range(5, 16))
    assert {outputs for _, outputs in drawn} == set(range(2, 7))


def test_a_seed_gives_the_same_prompts() -> None:
    lengths = RandomLengths(5, 5)
    assert random_tokens(3, lengths, 99, rng(1)) == random_tokens(3, lengths, 99, rng(1))
    assert random_words(3, lengths, rng(1)) == random_words(3, lengths, rng(1))
    assert random_words(3, lengths, rng(1)) != random_words(3, lengths, rng(2))


def test_random_words_are_as_many_as_requested_tokens() -> None:
    (prompt,) = random_words(1, RandomLengths(12, 3), rng())
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == 12


def test_sharegpt_takes_first_questions_and_the_length_of_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}, {"value": "And?"}]
    short = [{"from": "human", "value": "Hello?"}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": short}, {"id": 3}]))
    assert sharegpt(path, 1, None, rng()) == [WorkloadPrompt("Why?", 2)]
    assert sharegpt(path, 1, 9, rng()) == [WorkloadPrompt("Why?", 9)]


def test_jsonl_takes_texts_tokens_and_messages(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "a"}, {"prompt": [1, 2], "output_tokens": 5}, {"messages": messages}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    prompts = jsonl(path, 3, 8, rng())
    assert sorted(prompts, key=str) == sorted(
        [WorkloadPrompt("a", 8), WorkloadPrompt((1, 2), 5), WorkloadPrompt(tuple(messages), 8)], key=str
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": ""}', 'jsonl:1 needs "prompt"'),
        ('{"prompt": [1, "a"]}', 'jsonl:1 needs "prompt"'),
        ('{"messages": []}', 'jsonl:1 needs "prompt"'),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens must be a whole number"),
        ("{", "is not JSON"),
        ('{"prompt": "a"}', "has 1 usable prompts"),
    ],
)
def test_a_bad_jsonl_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=message):
        jsonl(path, 2, 8, rng())


@pytest.mark.parametrize("text", ["[1]", "{}{", '[{"conversations": [{"value": "a"}, {}]}]'])
def test_an_invalid_sharegpt_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(text)
    with pytest.raises(BenchError, match="not a file of ShareGPT conversations"):
        sharegpt(path, 1, None, rng())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read"):
        jsonl(tmp_path / "none", 1, 8, rng())


@pytest.mark.parametrize(("inputs", "outputs", "ratio"), [(0, 1, 0), (1, 0, 0), (1, 1, 1.0), (1, 1, -0.1)])
def test_invalid_lengths_are_refused(inputs: int, outputs: int, ratio: float) -> None:
    with pytest.raises(BenchError, match=r"random lengths|range ratio"):
        RandomLengths(inputs, outputs, ratio)
