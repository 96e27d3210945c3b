"""The offline scripts of vLLM in their shape, against the packaged model."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamserve import (
    LLM,
    AsyncLLM,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    embedded,
)
from streamserve.execution.compute.memory import KV_FRACTION
from streamserve.execution.loading.device import KV_FRACTION as KV_FRACTION_OF_GPUS
from streamserve.llm.prompts import Prompt
from streamserve.protocol.errors import RequestError
from streamserve.settings.habits.table import habits_by_name
from streamserve.settings.resolve import resolve
from tests.adapters import write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=16)
QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    arguments: dict[str, Any] = {"trust_remote_code": True, "enforce_eager": True, "enable_lora": True}
    with LLM("embedded", dtype="float", max_model_len=512, threads=1, **arguments) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_basic(llm: LLM) -> None:
    prompts = ["Hello, my name is", "The capital of France is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.outputs[0].finished() for output in outputs)
    given: dict[str, Any] = {"use_tqdm": False, "priority": None, "lora_request": None}  # vLLM's defaults
    assert llm.generate(prompts, sampling_params=sampling_params, **given)[0].outputs == outputs[0].outputs


def test_prompts_are_mappings(llm: LLM) -> None:
    text = "Hello, my name is"
    ids = llm.get_tokenizer().encode(text)
    prompts: list[Prompt] = [
        {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "x"},
    ]  # fmt: skip
    outputs = llm.generate(prompts, GREEDY)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt for output in outputs] == [text, None, "x"]
    assert texts(llm.generate({"prompt": text}, GREEDY)) == texts(outputs)[:1]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data: only text is served"),
        ({"prompt_embeds": [1]}, "prompt_embeds: a prompt must consist of tokens: give prompt_token_ids"),
        ({"text": "x"}, "text: a prompt has prompt, prompt_token_ids and cache_salt"),
        ({}, "a prompt needs prompt or prompt_token_ids"),
    ],
)
def test_other_prompts_are_refused_by_name(llm: LLM, prompt: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        llm.generate([prompt], GREEDY)


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, GREEDY)
    assert "19" in output.outputs[0].text
    assert output.prompt == llm.get_tokenizer().apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True
    )
    assert output.prompt_token_ids == llm.render(QUESTION)
    begun = [*QUESTION, {"role": "assistant", "content": "12 + 7 ="}]
    (continued,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert continued.prompt is not None
    assert continued.prompt.endswith("12 + 7 =")
    with pytest.raises(RequestError, match="continue_final_message needs add_generation_prompt"):
        llm.chat(begun, GREEDY, continue_final_message=True)


def test_chat_with_another_template(llm: LLM) -> None:
    template = "{% for message in messages %}[{{ message.content }}{{ mark }}]{% endfor %}{{ tools }}"
    (output,) = llm.chat(
        QUESTION, GREEDY, chat_template=template, chat_template_kwargs={"mark": "!"}, tools=TOOLS
    )
    assert output.prompt == f"[What is 12 + 7?!]{TOOLS}"
    with pytest.raises(RequestError, match="chat_template does not compile: the chat template, line 1: "):
        llm.chat(QUESTION, GREEDY, chat_template="{% if %}")


def test_structured_outputs(llm: LLM) -> None:
    schema = {
        "type": "object", "properties": {"sum": {"enum": [18, 19]}}, "required": ["sum"],
        "additionalProperties": False,
    }  # fmt: skip
    formats = [
        StructuredOutputsParams(choice=["positive", "negative"]),
        StructuredOutputsParams(regex="[0-9]{3}-[0-9]{4}"),
        StructuredOutputsParams(json=schema),
        StructuredOutputsParams(grammar='root ::= "SELECT " ("a" | "b")'),
    ]
    params = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=each) for each in formats]
    choice, regex, object_, grammar = texts(llm.generate(["Answer: "] * 4, params))
    assert choice in ("positive", "negative")
    assert (len(regex), regex[3]) == (8, "-")
    assert json.loads(object_)["sum"] in (18, 19)
    assert grammar in ("SELECT a", "SELECT b")


def test_bad_words(llm: LLM) -> None:
    (free,) = llm.generate("Hello, my name is", GREEDY)
    word = free.outputs[0].text.strip()[:4]
    params = SamplingParams(temperature=0, max_tokens=16, bad_words=[word])
    (output,) = llm.generate("Hello, my name is", params)
    assert word in free.outputs[0].text
    assert word not in output.outputs[0].text


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate("Hello", params)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    chosen = [entries[token] for token, entries in zip(choice.token_ids, choice.logprobs, strict=True)]
    assert [entry.rank for entry in chosen] == [1] * len(chosen)
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    for entries in choice.logprobs:
        ranked = sorted(entries.values(), key=lambda entry: -entry.logprob)
        assert [entry.rank for entry in ranked] == [1, 2]
    assert output.prompt_logprobs is not None
    for token, prompt_entries in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert prompt_entries is not None
        assert prompt_entries[token].rank is not None
    assert llm.generate("Hello", GREEDY)[0].outputs[0].cumulative_logprob is None


def test_metrics(llm: LLM) -> None:
    (output,) = llm.generate("Hello", GREEDY)
    metrics = output.metrics
    assert metrics.num_generation_tokens == len(output.outputs[0].token_ids) > 1
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts < metrics.last_token_ts
    assert metrics.first_token_latency == metrics.first_token_ts - metrics.queued_ts


def test_detokenize_and_truncation(llm: LLM) -> None:
    (whole,) = llm.generate("Hello, my name is", GREEDY)
    params = SamplingParams(temperature=0, max_tokens=16, detokenize=False, truncate_prompt_tokens=3)
    (output,) = llm.generate("x x x x Hello, my name is", params)
    assert len(output.prompt_token_ids) == 3
    assert (output.outputs[0].text, bool(output.outputs[0].token_ids)) == ("", True)
    params = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    assert llm.generate("Hello, my name is", params)[0].outputs[0].token_ids == whole.outputs[0].token_ids


def test_prefix_caching(llm: LLM) -> None:
    prompt = "You are an expert school principal. " * 8
    first, second = (llm.generate(prompt + name, GREEDY)[0] for name in ("Alice", "Bob"))
    assert second.num_cached_tokens > 16
    assert llm.reset_prefix_cache()
    (again,) = llm.generate(prompt + "Bob", GREEDY)
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == second.outputs[0].token_ids
    salted, other = (llm.generate({"prompt": prompt, "cache_salt": salt}, GREEDY)[0] for salt in "ab")
    assert (salted.num_cached_tokens, other.num_cached_tokens) == (0, 0)
    assert first.outputs[0].token_ids


def test_lora(llm: LLM, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", embedded.path("embedded"), gain=4.0)
    request = LoRARequest("sql-lora", 1, str(folder))
    plain, adapted, again = llm.chat([QUESTION] * 3, GREEDY, lora_request=[None, request, request])
    assert adapted.lora_request == request
    assert adapted.outputs[0].token_ids == again.outputs[0].token_ids != plain.outputs[0].token_ids
    (named,) = llm.chat(QUESTION, GREEDY, lora="sql-lora")
    assert named.outputs[0].token_ids == adapted.outputs[0].token_ids
    with pytest.raises(RequestError, match="the name sql-lora is used by the LoRA adapter in"):
        llm.generate("Hello", GREEDY, lora_request=LoRARequest("sql-lora", 1, str(tmp_path)))
    llm.unload_adapter("sql-lora")


def test_a_batch_of_a_file(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"question": f"What is {n} + 7?"}) + "\n" for n in range(8)))
    chats = [
        [{"role": "user", "content": json.loads(line)["question"]}] for line in file.read_text().splitlines()
    ]
    outputs = llm.chat(chats, GREEDY)
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps({"answer": text}) + "\n" for text in texts(outputs)))
    assert len(results.read_text().splitlines()) == len(chats)
    assert texts(outputs) == [texts(llm.chat(chat, GREEDY))[0] for chat in chats]


def test_the_tokenizer_has_the_names_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("Hello")
    assert tokenizer("Hello") == {"input_ids": ids}
    assert tokenizer(["Hello", "Hello"]) == {"input_ids": [ids, ids]}
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["Hello"]
    assert tokenizer.decode(tokenizer.eos_token_id or 0) == tokenizer.eos_token
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True) == llm.render(QUESTION)
    assert len(tokenizer) == tokenizer.vocab_size
    assert tokenizer.convert_ids_to_tokens(ids) == [llm.tokenizer.piece(token) for token in ids]


def test_default_sampling_params(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert isinstance(params, SamplingParams)
    assert {name: getattr(params, name) for name in llm.default_sampling} == dict(llm.default_sampling)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda llm: llm.beam_search(["x"], None), "beam_search: .*: use generate with n"),
        (lambda llm: llm.sleep(level=1), "sleep: .*: use close, and create the LLM again"),
        (lambda llm: llm.classify(["x"]), "classify: .*: use generate with structured_outputs"),
    ],
)
def test_what_is_not_supported_says_what_to_use(llm: LLM, call: Any, error: str) -> None:
    with pytest.raises(NotImplementedError, match=error):
        call(llm)


def test_arguments_of_other_types_are_refused_by_name(llm: LLM) -> None:
    parameters: Any = {"temperature": 0}
    with pytest.raises(TypeError, match="must be SamplingParams, not dict"):
        llm.generate("a", parameters)
    text: Any = b"abc"
    with pytest.raises(TypeError, match=r"prompts must be a string, .*, not b'abc'"):
        llm.generate(text)
    with pytest.raises(TypeError, match="a prompt must be a text or token ids, not bytes"):
        llm.generate([text])


def test_a_model_that_generates_neither_embeds_nor_scores(llm: LLM) -> None:
    with pytest.raises(RequestError, match='this model does not embed: give task="embed"'):
        llm.embed("x")
    with pytest.raises(RequestError, match='neither scores nor embeds: give task="score" or "embed"'):
        llm.score("x", ["y", "z"])
    with pytest.raises(RequestError, match="2 first texts and 3 second texts: give one first text"):
        llm.score(["a", "b"], ["a", "b", "c"])


def test_the_async_engine_yields_outputs_of_every_kind(llm: LLM) -> None:
    """The kinds differ in what is yielded, not in the text."""
    engine: AsyncLLM = llm._llm

    async def outputs(kind: RequestOutputKind) -> list[RequestOutput]:
        params = SamplingParams(temperature=0, max_tokens=16, output_kind=kind)
        return [output async for output in engine.generate("Hello", params, request_id=f"kind-{kind}")]

    kinds = [
        asyncio.run_coroutine_threadsafe(outputs(kind), llm._loop).result() for kind in RequestOutputKind
    ]
    cumulative, delta, final = kinds
    text = texts(llm.generate("Hello", GREEDY))[0]
    assert (len(final), len(cumulative) > 4, len(delta) > 4) == (1, True, True)
    assert [texts(final)[-1], texts(cumulative)[-1], "".join(texts(delta))] == [text] * 3
    assert all(one in other for one, other in pairwise(texts(cumulative)))
    for outputs_of_kind in kinds:
        assert [output.finished for output in outputs_of_kind] == [False] * (len(outputs_of_kind) - 1) + [
            True
        ]


def test_each_part_of_the_output_is_in_one_delta(llm: LLM) -> None:
    """A script that joins the deltas, or counts the choices that end, needs no more than they have."""
    engine: AsyncLLM = llm._llm
    given = SamplingParams(
        n=3, temperature=1.0, seed=2, max_tokens=24, stop=(".",), logprobs=0, prompt_logprobs=1
    )

    async def outputs() -> list[RequestOutput]:
        params = msgspec.structs.replace(given, output_kind=RequestOutputKind.DELTA)
        return [output async for output in engine.generate("Hello, my name is", params)]

    (whole,) = llm.generate("Hello, my name is", given)
    deltas = asyncio.run_coroutine_threadsafe(outputs(), llm._loop).result()
    parts = [choice for output in deltas for choice in output.outputs]
    assert len({len(choice.token_ids) for choice in whole.outputs}) > 1, "they end at different times"
    assert {len(output.outputs) for output in deltas} == {1}
    for choice in whole.outputs:
        own = [part for part in parts if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        assert [token for part in own for token in part.token_ids] == choice.token_ids
        assert [entry for part in own for entry in part.logprobs or ()] == choice.logprobs
        assert [part.finish_reason for part in own if part.finished()] == [choice.finish_reason]
        assert own[-1].cumulative_logprob == choice.cumulative_logprob
    with_prompt = [output.prompt_logprobs for output in deltas if output.prompt_logprobs is not None]
    assert with_prompt == [whole.prompt_logprobs]
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]


def test_the_share_of_the_memory_is_as_the_refusal_says() -> None:
    said = habits_by_name()["gpu_memory_utilization"].here
    assert f"{KV_FRACTION * 100:.0f} % of a CPU's" in said
    assert f"{KV_FRACTION_OF_GPUS * 100:.0f} % of a GPU's" in said


def test_ordinary_arguments_of_the_class() -> None:
    settings = resolve(
        "embedded",
        {"dtype": "half", "enforce_eager": True, "seed": None, "pipeline_parallel_size": 1,
         "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        use="llm",
    )  # fmt: skip
    assert (settings.model.dtype, settings.model.draft) == ("float16", "ngram")
