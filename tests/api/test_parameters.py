"""HTTP fields become the parameters of the engine's request."""

from pathlib import Path
from typing import Any

import pytest

from streamserve.api.settings import ApiSettings
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import ScriptedGenerator, Submitted, scripted
from tests.text.folders import byte_level_folder

DEFAULTS = {"temperature": 0.7, "top_k": 20}


def submitted_by(
    generator: ScriptedGenerator, route: str, body: dict[str, Any], **settings: Any
) -> Submitted:
    """Return the engine request that one HTTP request submits."""
    watched = generator.replaced(submitted=[])
    with scripted(watched, ApiSettings(**settings)) as server:
        response = server.post(route, **body)
        assert response.status_code == 200, response.text
    (submitted,) = watched.submitted
    return submitted


def completion(generator: ScriptedGenerator, **fields: Any) -> Submitted:
    return submitted_by(generator, "/v1/completions", {"prompt": "hi", **fields})


def chat(generator: ScriptedGenerator, **fields: Any) -> Submitted:
    return submitted_by(
        generator, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields}
    )


def test_nothing_said_is_openais_default(generator: ScriptedGenerator) -> None:
    assert completion(generator).params == SamplingParams(max_tokens=16)
    assert chat(generator).params == SamplingParams(max_tokens=None)


def test_the_operators_defaults_give_way_to_the_request(generator: ScriptedGenerator) -> None:
    body = {"prompt": "hi", "top_k": 5}
    params = submitted_by(generator, "/v1/completions", body, default_sampling=DEFAULTS).params
    assert (params.temperature, params.top_k) == (0.7, 5)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1}, {}),
        ({"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}, {}),
        ({"n": 3, "max_tokens": 9, "min_tokens": 2, "ignore_eos": True}, {}),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, {}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"], "stop_token_ids": [7]}, {"stop": ("x", "y"), "stop_token_ids": (7,)}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"logit_bias": {"5": -100, "6": 1.5}}, {"logit_bias": {5: -100.0, 6: 1.5}}),
        ({"prompt_logprobs": 2}, {}),
    ],
)
def test_sampling_fields_of_both_routes(
    generator: ScriptedGenerator, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    for params in (completion(generator, **fields).params, chat(generator, **fields).params):
        for name, value in {**fields, **expected}.items():
            assert getattr(params, name) == value


def test_logprobs_of_completions(generator: ScriptedGenerator) -> None:
    assert completion(generator, logprobs=3).params.logprobs == 3
    params = completion(generator, logprobs=3, echo=True, prompt_logprobs=1).params
    assert (params.logprobs, params.prompt_logprobs) == (3, 3)


def test_logprobs_of_chats(generator: ScriptedGenerator) -> None:
    assert chat(generator, logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(generator, logprobs=True).params.logprobs == 0
    assert chat(generator, logprobs=False).params.logprobs is None


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chats_limit_has_two_names(generator: ScriptedGenerator, name: str) -> None:
    assert chat(generator, **{name: 5}).params.max_tokens == 5


def test_priority_and_salt_go_along(generator: ScriptedGenerator) -> None:
    for submitted in (
        completion(generator, priority=-2, cache_salt="mine"),
        chat(generator, priority=-2, cache_salt="mine"),
    ):
        assert (submitted.options.priority, submitted.options.cache_salt) == (-2, "mine")


def test_special_tokens_are_added_to_texts_but_not_to_chats(generator: ScriptedGenerator) -> None:
    begin = generator.tokenizer.bos_token_id
    assert completion(generator).prompt[0] == begin
    assert completion(generator, add_special_tokens=False).prompt[0] != begin
    assert begin not in chat(generator).prompt
    assert chat(generator, add_special_tokens=True).prompt[0] == begin


def test_every_prompt_has_a_request_id_of_its_own(generator: ScriptedGenerator) -> None:
    watched = generator.replaced(submitted=[])
    with scripted(watched) as server:
        reply = server.post("/v1/completions", prompt=["a", "b"]).json()
    assert [submitted.request_id for submitted in watched.submitted] == [
        f"{reply['id']}-0",
        f"{reply['id']}-1",
    ]


def test_template_variables_reach_the_template(generator: ScriptedGenerator, tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path, chat_template="{{ mood }}: {{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(folder)
    submitted = chat(generator.replaced(tokenizer=tokenizer), chat_template_kwargs={"mood": "glad"})
    assert tokenizer.decode(submitted.prompt) == "glad: hi"
