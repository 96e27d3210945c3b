import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from benchmarks.engines.peers import checkpoints, child, http, quality, rounds, scenarios
from benchmarks.engines.peers.engine import Engine, EngineError
from tests.benchmarks.engines import fake_engine

CHAT = scenarios.Scenario("chat", streams=2, known=8, new=3, out=2, turns=2)
FLAT = scenarios.Scenario("flat", new=4, out=3)


def record(engine: str, cost: float, number: int = 0) -> rounds.Record:
    entry = {"slice": "a", "round": number, "scenario": "one", "engine": engine, "cost": cost}
    return {**entry, "value": 1 / cost, "unit": "tokens/s"}


def test_texts_grow_from_turn_to_turn_and_begin_with_what_is_known() -> None:
    engine = fake_engine.Engine("", "", 1, 0, {})
    task = scenarios.work("chat", CHAT, "seed")
    answers = child.run(engine, task)["answers"]
    known, first, second = engine.seen
    assert known == [task["known"]]
    assert first == [task["known"] + new for new in task["turns"][0]]
    assert second == [
        text + answer + new for text, answer, new in zip(first, answers[0], task["turns"][1], strict=True)
    ]


def test_only_what_is_known_is_the_same_in_every_round() -> None:
    one, other = scenarios.work("chat", CHAT, "1"), scenarios.work("chat", CHAT, "2")
    assert one["known"] == other["known"]
    assert one["turns"] != other["turns"]


def test_the_floor_of_a_turn_is_one_step_for_what_is_new_and_one_for_each_further_token() -> None:
    model = checkpoints.Model(hidden=8, layers=1, heads=2, kv_heads=1, ffn=16)
    layer, head = 8 * (16 + 8 + 48), 32_000 * 8
    kv = 2 * 4 * 2  # keys and values of four numbers, each of two bytes
    weights = 2 * (layer + head)
    assert (model.layer_parameters, model.head_parameters, model.kv_bytes) == (layer, head, kv)
    read = sum(weights + context * kv for context in (4, 5, 6))
    assert scenarios.floor(model, FLAT, bandwidth=1.0, rate=1e30) == read
    pairs = (1 + 2 + 3 + 4) + 5 + 6
    flops = 2 * (6 * layer + 3 * head) + 4 * 8 * pairs
    assert scenarios.floor(model, FLAT, bandwidth=1e30, rate=1.0) == pytest.approx(flops)


def test_ratios_pair_what_the_same_round_measured() -> None:
    ours = [record("streamserve", 1.0, 0), record("streamserve", 10.0, 1)]
    theirs = [record("vllm", 2.0, 0), record("vllm", 20.0, 1), record("vllm", 500.0, 2)]
    entry = rounds.figures([*ours, *theirs])["one"]["vllm"]
    assert entry["ratio"] == 2
    assert entry["interval"] == (2, 2)
    assert entry["rounds"] == 3


def test_the_best_peer_keeps_its_cache_in_sixteen_bits() -> None:
    lines = [
        record("streamserve", 1.0),
        record("vllm", 3.0),
        record("openvino", 2.0),
        record("openvino-u8", 1.5),
    ]
    assert rounds.best_peer(rounds.figures(lines)["one"]) == "openvino"
    assert rounds.best_peer(rounds.figures(lines[:1])["one"]) is None


def test_the_interval_holds_the_median_and_narrows_with_rounds() -> None:
    low, high = rounds.bootstrap([1.0, 1.1, 1.2, 1.3, 1.4])
    assert low < 1.2 < high
    narrow_low, narrow_high = rounds.bootstrap([1.0, 1.1, 1.2, 1.3, 1.4] * 20)
    assert narrow_high - narrow_low < high - low


def test_records_of_several_slices_add_up(tmp_path: Path) -> None:
    for number in range(2):
        rounds.append(tmp_path / "kept" / "rounds.jsonl", record("vllm", 1.0, number))
    assert len(rounds.read(tmp_path / "kept" / "rounds.jsonl")) == 2


def test_words_are_encoded_to_their_ids(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path, 128)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoints.VOCABULARY
    ids = [checkpoints.WORDS[i] for i in (0, 1, 700, -1, 12_345)]
    assert tokenizer.encode(checkpoints.text(ids)).ids == ids


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 500 Error\r\n\r\nno",
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": []}\n\n',
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": []}\n\ndata: {"usage": {"completion_tokens": 3}}\n\n',
    ],
)
def test_a_reply_with_other_than_the_tokens_asked_for_is_an_error(reply: bytes) -> None:
    with pytest.raises(EngineError):
        http.check(reply, 2)


def test_a_reply_counts_by_its_usage_or_else_by_its_events() -> None:
    event = b'data: {"choices": [{"text": "a"}]}\n\n'
    http.check(b"HTTP/1.1 200 OK\r\n\r\n" + 2 * event, 2)
    http.check(b"HTTP/1.1 200 OK\r\n\r\n" + event + b'data: {"usage": {"completion_tokens": 2}}\n\n', 2)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    load: dict[str, Any] = {"checkpoint": "", "converted": "", "threads": 1, "kv_bytes": 0, "options": {}}
    command = [sys.executable, "-m", "benchmarks.engines.peers.child", "tests.benchmarks.engines.fake_engine"]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    cores = sorted(os.sched_getaffinity(0))
    first = scenarios.work("first", FLAT, "")
    started = Engine(command, variables, tmp_path / "log", cores, load, first)
    yield started
    started.end(grace=10)


def test_an_engine_runs_in_a_process_of_its_own_and_is_stopped_meanwhile(engine: Engine) -> None:
    assert engine.version == "1"
    assert engine.precision == "exact"
    assert engine.ready > 0
    assert engine.memory()["anonymous"] > 0
    engine.stop()
    deadline = time.monotonic() + 10
    while psutil.Process(engine.popen.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
    engine.go()
    done = engine.run(scenarios.work("flat", FLAT, "1"))
    assert done["answers"] == [[[4, 5, 6]]]
    assert done["seconds"] >= 0
    assert "engines print what they like" in engine.log.read_text()


def test_too_few_tokens_are_an_error_and_the_engine_goes_on(engine: Engine) -> None:
    with pytest.raises(EngineError, match="2 tokens came out where 3"):
        engine.run(scenarios.work("short", FLAT, "1"))
    assert engine.run(scenarios.work("flat", FLAT, "1"))["answers"]


def test_an_engine_that_leaves_is_an_error(engine: Engine) -> None:
    with pytest.raises(EngineError, match="ended with status 3"):
        engine.run(scenarios.work("leave", FLAT, "1"))


def test_a_stopped_engine_can_be_ended(engine: Engine) -> None:
    engine.stop()
    engine.end(grace=10)
    assert engine.popen.returncode == 0
    assert "closed" in engine.log.read_text()


def test_a_peer_is_compared_with_our_fastest_engine_that_rounds_no_worse() -> None:
    lines = [
        record("streamserve", 4.0),
        record("streamserve-int8", 2.0),
        record("streamserve-int4", 1.0),
        record("openvino", 6.0),
        record("openvino-int8", 3.2),
        record("openvino-int4-64", 1.3),
        record("openvino-u8", 0.1),
    ]
    finer = {"streamserve": 0, "streamserve-int8": 1, "streamserve-int4": 2}
    coarse = {"openvino": 0, "openvino-int8": 1, "openvino-int4-64": 2}
    entry = rounds.any_width(lines, lambda ours, peer: finer[ours] <= coarse[peer])["one"]
    assert (entry["peer"], entry["ours"], entry["ratio"]) == ("openvino-int4-64", "streamserve-int4", 1.3)
    entry = rounds.any_width(lines, lambda ours, peer: finer[ours] < max(coarse[peer], 1))["one"]
    assert (entry["peer"], entry["ours"]) == ("openvino-int4-64", "streamserve-int8")
    assert entry["ratio"] == pytest.approx(0.65)
    assert rounds.any_width(lines, lambda ours, peer: False) == {}


def test_divergence_is_zero_of_equal_distributions_and_positive_of_others() -> None:
    exact = [np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))]
    other = [np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]))]
    assert quality.compare(exact, exact)["divergence"] == 0
    compared = quality.compare(exact, other)
    assert compared["divergence"] == pytest.approx((0.5 - 0.25) * np.log(2) / 2)
    assert compared["same greedy token"] == 0.5


def test_a_difference_counts_beyond_the_interval_of_its_mean() -> None:
    assert quality.significantly_above([1.0, 1.1, 0.9, 1.0])
    assert not quality.significantly_above([1.0, -1.1, 0.9, -0.7])
    assert not quality.significantly_above([-1.0, -1.1, -0.9, -1.0])
