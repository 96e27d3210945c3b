"""`LLM` turns prompts into outputs in a single call, in vLLM's shape."""

import json
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from streamserve import LLM, SamplingParams
from streamserve.cli.serving import api_settings
from streamserve.fleet.fork_server import LINGERING
from streamserve.protocol.errors import CheckpointError, RequestError
from streamserve.protocol.reports import Report
from streamserve.settings.options import SettingsError
from streamserve.settings.sampling import recommended_sampling
from tests.api.serving import until
from tests.checkpoints import make_checkpoint
from tests.reports import newer_reports

ROOT = Path(__file__).parents[1]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("llama"), max_position_embeddings=8192)
    with LLM(str(folder), threads=1, log_level="warning") as llm:
        yield llm


def test_texts_and_token_ids_give_the_same(llm: LLM) -> None:
    text = "the quick brown fox"
    ids = llm.tokenizer.encode(text)
    one, two = llm.generate([text, ids], GREEDY, use_tqdm=False)
    assert one.prompt == text
    assert two.prompt is None
    assert one.prompt_token_ids == two.prompt_token_ids == ids
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert one.outputs[0].text == llm.tokenizer.decode(one.outputs[0].token_ids)
    assert one.outputs[0].finish_reason == "length"
    assert one.finished


def test_progress_is_shown_on_standard_error_for_several_prompts(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate("hello", GREEDY)
    assert capfd.readouterr() == ("", "")
    llm.generate(["hello", "world"], GREEDY)
    out, err = capfd.readouterr()
    assert out == ""
    assert "2/2" in err


def test_a_single_prompt_needs_no_list(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    by_text, by_ids = (llm.generate(prompt, GREEDY, use_tqdm=False) for prompt in ("hello", ids))
    assert len(by_text) == len(by_ids) == 1
    assert by_text[0].outputs[0].token_ids == by_ids[0].outputs[0].token_ids


def test_token_ids_may_be_integers_of_any_kind(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    plain, numpy_ids = llm.generate([ids, np.array(ids)], GREEDY, use_tqdm=False)
    (alone,) = llm.generate(np.array(ids), GREEDY, use_tqdm=False)
    (numpy_list,) = llm.generate([np.int64(token) for token in ids], GREEDY, use_tqdm=False)
    for other in (numpy_ids, alone, numpy_list):
        assert other.outputs[0].token_ids == plain.outputs[0].token_ids


def test_an_interrupted_call_leaves_no_request_running(llm: LLM) -> None:
    def interrupt() -> None:
        until(lambda: report().running > 0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def report() -> Report:
        report = llm.report()
        assert report
        return report

    until(lambda: llm.report() is not None)
    until(lambda: report().running == 0)  # The last report may be from an earlier test.
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"] * 50, SamplingParams(max_tokens=8000, ignore_eos=True), use_tqdm=False)
    thread.join()
    until(lambda: (report().running, report().waiting, report().blocks_live) == (0, 0, 0))


@pytest.fixture(scope="module")
def recommending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose checkpoint recommends sampling settings that make every choice greedy."""
    folder = make_checkpoint(tmp_path_factory.mktemp("recommending"), max_position_embeddings=128)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 1}))
    with LLM(str(folder), threads=1, log_level="warning") as llm:
        yield llm


def test_without_parameters_the_values_that_the_checkpoint_recommends_apply(recommending: LLM) -> None:
    llm, chat = recommending, [{"role": "user", "content": "hello"}]
    assert dict(llm.default_sampling) == {"temperature": 0.7, "top_k": 1}
    greedy = SamplingParams(temperature=0)
    (expected,), (output,) = (llm.generate("hello", params, use_tqdm=False) for params in (greedy, None))
    assert output.outputs == expected.outputs
    streamed = [token for delta in llm.stream("hello") for token in delta.tokens]
    assert streamed == expected.outputs[0].token_ids
    unbounded = SamplingParams(temperature=0, max_tokens=None)
    (expected,), (output,) = (llm.chat(chat, params, use_tqdm=False) for params in (unbounded, None))
    assert output.outputs == expected.outputs
    assert len(output.outputs[0].token_ids) > 16


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0, "top_k": 5}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": None}, {}),
        ({}, {}),
    ],
)
def test_a_checkpoint_that_does_not_sample_recommends_temperature_0(
    tmp_path: Path, fields: dict[str, object], expected: dict[str, object]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert recommended_sampling(tmp_path) == expected


def test_given_parameters_are_complete(recommending: LLM) -> None:
    params = SamplingParams(seed=5, ignore_eos=True)
    (sampled,) = recommending.generate("hello", params, use_tqdm=False)
    (default,) = recommending.generate(
        "hello", SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False
    )
    assert sampled.outputs[0].token_ids != default.outputs[0].token_ids


def test_the_server_applies_the_same_values(recommending: LLM) -> None:
    settings = recommending._llm.settings
    assert api_settings(settings, local_only=True).default_sampling == recommending.default_sampling


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    llm = LLM(str(make_checkpoint(tmp_path_factory.mktemp("closed"))), threads=1, log_level="warning")
    llm.close()
    return llm


def test_a_closed_llm_says_so(closed: LLM) -> None:
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        closed.generate("a", GREEDY)


@pytest.mark.parametrize("prompt", [["1", "2"], [1.5], [None]])
def test_a_prompt_of_another_type_is_refused_at_once(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="text or token ids"):
        llm.generate([prompt], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("prompt", "params", "keywords"),
    [
        ([-1], GREEDY, {}),
        ([10**9], GREEDY, {}),
        ([1], SamplingParams(stop=[b"x"]), {}),  # type: ignore[list-item]
        ([1], SamplingParams(ignore_eos=1j), {}),  # type: ignore[arg-type]
        ([1], GREEDY, {"priority": [1.5]}),
        ([1], GREEDY, {"priority": 2**70}),
    ],
)
def test_parameters_that_cannot_be_encoded_are_refused_before_they_are_sent(
    llm: LLM, prompt: list[int], params: SamplingParams, keywords: dict[str, Any]
) -> None:
    with pytest.raises(RequestError):
        llm.generate([prompt], params, use_tqdm=False, **keywords)
    assert llm.generate("hello", GREEDY, use_tqdm=False)[0].finished


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, seed=1, ignore_eos=True) for count in (1, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5]
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        llm.generate(["a", "b"], params[:1], use_tqdm=False)


def test_several_choices_differ_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=10, ignore_eos=True)
    first, second = (llm.generate("hello", params, use_tqdm=False)[0].outputs for _ in range(2))
    assert [choice.index for choice in first] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first}) == 3
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in second]


def test_logprobs_name_the_chosen_token_and_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate("the lazy dog", params, use_tqdm=False)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    for token, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        assert len(entries) == 3, "a greedy token is among the likeliest"
        assert entries[token].logprob == max(entry.logprob for entry in entries.values())
        assert entries[token].decoded_token == llm.tokenizer.token_text(token)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for token, entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entries is not None
        assert token in entries


def test_a_chat_is_rendered_by_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (by_chat,) = llm.chat(messages, GREEDY, use_tqdm=False)
    (by_hand,) = llm.generate([llm.render(messages)], GREEDY, use_tqdm=False)
    assert by_chat.outputs[0].token_ids == by_hand.outputs[0].token_ids
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


def test_a_chat_that_is_no_list_of_messages_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must be an object with role and content"):
        llm.chat("hello", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="lone surrogate"):
        llm.chat([{"role": "user", "content": "\ud800"}], GREEDY)


def test_a_stream_gives_the_same_text_in_pieces(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY, use_tqdm=False)
    deltas = list(llm.stream("hello", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert len(deltas) > 3
    assert deltas[-1].finish == "length"


def test_leaving_the_loop_of_a_stream_cancels_it(llm: LLM) -> None:
    before = generated(llm)
    for _ in llm.stream("hello", SamplingParams(max_tokens=8000, ignore_eos=True)):
        break
    until(lambda: not llm._llm._runtime._clients)
    reported = newer_reports(llm._llm)
    until(lambda: reported() and generated(llm) > before and idle(llm))
    assert generated(llm) - before < 7000


def idle(llm: LLM) -> bool:
    report = llm.report()
    return report is not None and (report.running, report.blocks_live) == (0, 0)


def generated(llm: LLM) -> int:
    report = llm.report()
    return report.generation_tokens if report else 0


def test_the_first_refused_prompt_is_raised(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.generate(["fine", []], GREEDY, use_tqdm=False)


def test_bad_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(SettingsError, match="max_num_sequences"):
        LLM("embedded", max_num_sequences=3)


def test_closing_twice_is_harmless(closed: LLM) -> None:
    closed.close()


def test_an_llm_is_closed_when_it_is_garbage_collected_and_when_python_exits(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_position_embeddings=512)
    script = textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from streamserve import LLM
        from tests.processes import workers_below

        def tell():
            workers = workers_below(os.getpid())
            folder = llm._llm._runtime.driver.launcher.control.folder
            print(folder, *(worker.pid for worker in workers), flush=True)

        llm = LLM({str(folder)!r}, threads=1)
        tell()
        del llm
        assert not workers_below(os.getpid())
        llm = LLM({str(folder)!r}, threads=1, timeline={str(tmp_path / "timeline.json")!r})
        tell()
        if not (fork := os.fork()):  # the fork is not the owner
            try:
                llm.generate("hi", use_tqdm=False)
            except RuntimeError as error:
                sys.exit(7 if "forked" in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 7
        assert llm._llm._runtime.driver.launcher.control.folder.exists()
        llm.generate("hi", use_tqdm=False)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "timeline.json").read_text())
    printed = [line.split() for line in done.stdout.splitlines()]
    assert len(printed) == 2
    for folder, *workers in printed:
        assert not Path(folder).exists()
        assert workers
        assert not any(psutil.pid_exists(int(worker)) for worker in workers)


def test_a_model_that_cannot_be_served_raises_and_leaves_no_threads(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, max_position_embeddings=512)
    (folder / "model.safetensors").unlink()
    before = set(threading.enumerate())
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(str(folder), threads=1, timeline=str(tmp_path / "timeline.json"))
    until(lambda: {t for t in threading.enumerate() if t.name != LINGERING} <= before)
