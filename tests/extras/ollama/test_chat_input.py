"""Ollama's requests are converted to chat requests."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.schemas import ChatRequest
from streamserve.extras.ollama.chat_input import as_chat, as_generation
from streamserve.extras.ollama.other_fields import OTHER_OPTIONS
from streamserve.extras.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from streamserve.protocol.errors import RequestError

USER: Any = {"role": "user", "content": "hi"}


def converted(options: dict[str, Any], ignored: IgnoredFields | None = None) -> ChatRequest:
    body = OllamaGenerateRequest(prompt="hi", options=options)
    return as_generation(body, "small", ignored or IgnoredFields(strict=False))


def messages_of(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    body = OllamaChatRequest(messages=[*messages])
    return as_chat(body, "small", IgnoredFields(strict=False)).messages


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, {}),
        ({"presence_penalty": 1.5, "frequency_penalty": -1}, {}),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1}),
        ({"num_predict": 7}, {"max_completion_tokens": 7}),
        ({"num_predict": -1}, {"max_completion_tokens": None}),
        ({"num_predict": 0}, {"max_completion_tokens": None}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {"seed": None}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"mirostat": 0, "tfs_z": 1, "typical_p": 1.0, "penalize_newline": True}, {}),
        ({"temperature": None}, {"temperature": None}),
    ],
)
def test_options_are_fields_of_a_chat(options: dict[str, Any], fields: dict[str, Any]) -> None:
    chat = converted(options, IgnoredFields(strict=True))
    known = {name: value for name, value in options.items() if name in ChatRequest.__struct_fields__}
    for name, value in {**known, **fields}.items():
        assert getattr(chat, name) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mirostat": 2}, "options.mirostat is not supported: leave it out, or set it to 0"),
        ({"repeat_last_n": 64}, "options.repeat_last_n is not supported: leave it out, or set it to -1"),
        ({"temperature": "hot"}, "options.temperature: expected `float"),
        ({"seed": 2**70}, "options.seed is out of range"),
    ],
)
def test_options_that_would_change_the_text_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        converted(options)
    assert refused.value.message.startswith(message)
    assert refused.value.field == "options"


def test_each_option_of_ollamas_client_has_a_class() -> None:
    """Each option in Ollama's client class Options, which sends them by these names, has a class here."""
    sent = (
        "numa num_ctx num_batch num_gpu main_gpu low_vram f16_kv logits_all vocab_only use_mmap use_mlock "
        "embedding_only num_thread num_keep seed num_predict top_k top_p tfs_z typical_p repeat_last_n "
        "temperature repeat_penalty presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta "
        "penalize_newline stop"
    )
    classes = (OllamaOptions.__struct_fields__, OTHER_OPTIONS.refused, OTHER_OPTIONS.without_effect)
    for option in sent.split():
        assert sum(option in known for known in classes) == 1, option


def test_messages_have_the_chats_fields() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}, "index": 0}}
    assert messages_of(
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "thinking": "Add.", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ) == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Add.",
            "tool_calls": [
                {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "content": "2", "name": "add", "tool_call_id": "call00000"},
    ]


def test_a_message_may_lack_its_content() -> None:
    assert messages_of({"role": "user"}, {"role": "assistant", "thinking": "Hm.", "content": None}) == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
    ]


names = st.sampled_from(["add", "sub", "mul"])


@settings(max_examples=50)
@given(data=st.data(), calls=st.lists(names, min_size=1, max_size=5), with_ids=st.booleans())
def test_each_result_belongs_to_a_call_of_its_function(
    data: st.DataObject, calls: list[str], with_ids: bool
) -> None:
    """Each result is matched to a call of its function, with and without ids, in any order of the functions,
    over several turns."""
    turns: list[dict[str, Any]] = []
    for turn in range(2):
        given_ids = [f"id-{turn}-{number}" for number in range(len(calls))]
        made = [{"function": {"name": name, "arguments": {}}} for name in calls]
        if with_ids:
            made = [{**call, "id": given} for call, given in zip(made, given_ids, strict=True)]
        order = data.draw(st.permutations(range(len(calls))))
        results = [{"role": "tool", "content": "1", "tool_name": calls[number]} for number in order]
        turns += [USER, {"role": "assistant", "tool_calls": made}, *results]
    found = messages_of(*turns, USER)
    functions = {
        call["id"]: call["function"]["name"] for message in found for call in message.get("tool_calls", ())
    }
    answered = [(message["tool_call_id"], message["name"]) for message in found if message["role"] == "tool"]
    assert len(functions) == 2 * len(calls)
    assert {call_id: functions[call_id] for call_id, _ in answered} == dict(answered) == functions


def test_results_without_names_answer_calls_in_their_order() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("add", "sub")]
    results = [{"role": "tool", "content": text} for text in ("1", "2", "3")]
    found = messages_of(USER, {"role": "assistant", "tool_calls": calls}, *results)
    assert [message.get("tool_call_id") for message in found[2:]] == ["call00000", "call00001", "call00002"]
