"""Stored responses behave as OpenAI's client expects: they can be continued, retrieved, listed and deleted,
within limits."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest

from streamserve.api.settings import ApiSettings
from streamserve.extras.responses.response_store import ResponseStore, StoredResponse
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.text.tokenizer import Tokenizer
from tests.api.refusing import refused
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import CALL, TEMPLATE, WEATHER, says
from tests.text.folders import byte_level_folder

ROUTE = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> ScriptedGenerator:
    """A model whose template has tools and reasoning."""
    folder = byte_level_folder(tmp_path_factory.mktemp("talker"), chat_template=TEMPLATE)
    generator = ScriptedGenerator(Tokenizer.from_folder(folder), says("<think>Hm</think>", "hello"))
    return generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=4096))


@pytest.fixture(scope="module")
def talking(talker: ScriptedGenerator) -> Iterator[Served]:
    with scripted(talker) as server:
        yield server


def create(server: Served, **fields: Any) -> Any:
    return server.client.responses.create(**{"model": "scripted", "input": "hi", **fields})


def last_prompt(server: Served) -> str:
    ids = server.llm.submitted[-1].prompt
    return str(server.llm.tokenizer.decode(ids, skip_special_tokens=False))


def test_a_response_continues_an_earlier_one(server: Served) -> None:
    """A response continues an earlier one: the text equals that of the whole conversation in a single
    request."""
    common: Any = {"model": "tiny", "max_output_tokens": 8}
    first = server.client.responses.create(input="the quick", **common)
    second = server.client.responses.create(input="brown fox", previous_response_id=first.id, **common)
    assert second.previous_response_id == first.id
    history: Any = [
        {"role": "user", "content": "the quick"},
        *first.output,
        {"role": "user", "content": "brown fox"},
    ]
    whole = server.client.responses.create(input=history, store=False, **common)
    assert second.output_text == whole.output_text
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("{", "{}"),
        ("[1]", "invalid_json"),
        ("null", "{}"),
        ('{"a": NaN}', '{"a": "NaN"}'),
        ("[" * 80, "invalid_json"),
    ],
)
def test_a_response_with_odd_arguments_is_continued(
    talker: ScriptedGenerator, arguments: str, kept: str
) -> None:
    """A response with odd arguments can be continued, as the user cannot repair stored items."""
    call = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}'
    with scripted(talker.replaced(script=says(call))) as server:
        first = create(server, tools=[TOOL])
        assert first.output[0].type == "function_call"
        output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": []}
        create(server, tools=[TOOL], input=[output], previous_response_id=first.id)
        assert kept in last_prompt(server)


def test_unknown_keys_of_items_are_named_in_a_warning(talking: Served) -> None:
    part = {"type": "output_text", "text": "a", "parsed": 1}
    items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [part], "colour": 2}]
    response = talking.post(ROUTE, input=items)
    assert response.status_code == 200
    assert "unknown: input[].colour, input[].content[].parsed" in response.headers["warning"]
    more = talking.post(ROUTE, input="so?", previous_response_id=response.json()["id"])
    assert (more.status_code, "warning" in more.headers) == (200, False)


def test_a_retrieved_response_is_the_one_that_was_made(talking: Served) -> None:
    made = create(talking, metadata={"team": "a"}, instructions="Be brief.")
    assert made.store is True
    assert talking.client.responses.retrieve(made.id).to_dict() == made.to_dict()


def test_a_streamed_response_is_stored_too(talking: Served) -> None:
    with talking.client.responses.stream(model="scripted", input="hi") as stream:
        final = stream.get_final_response()
    assert talking.client.responses.retrieve(final.id).output_text == final.output_text == "hello"


def test_instructions_are_those_of_the_last_request(talking: Served) -> None:
    first = create(talking, instructions="Be brief.")
    create(talking, input="more", previous_response_id=first.id, instructions="Be long.")
    prompt = last_prompt(talking)
    assert "Be brief." not in prompt
    assert prompt.startswith("<|im_start|>system\nBe long.")
    assert prompt.index("hi") < prompt.index("<think>Hm</think>hello") < prompt.index("more")


def test_calls_of_an_earlier_response_get_their_results(talker: ScriptedGenerator) -> None:
    with scripted(talker.replaced(script=says(CALL))) as server:
        first = create(server, tools=[TOOL])
        output: Any = {
            "type": "function_call_output",
            "call_id": first.output[0].call_id,
            "output": "sunny",
        }
        create(server, input=[output], previous_response_id=first.id, tools=[TOOL])
        prompt = last_prompt(server)
    assert prompt.endswith(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_input_items_are_the_whole_conversation_in_pages(talking: Served) -> None:
    first = create(talking)
    second = create(talking, input=[{"role": "user", "content": "more"}], previous_response_id=first.id)
    items = list(talking.client.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message", "reasoning", "message", "message"]
    assert len({item.id for item in items}) == 4
    texts = [item.content[0].text for item in items if item.content]
    assert texts == ["hi", "Hm", "hello", "more"]
    newest = list(talking.client.responses.input_items.list(second.id))
    assert newest == items[::-1]
    assert [item.id for item in items[1:3]] == [item.id for item in first.output]


def test_a_deleted_response_is_gone_and_its_successor_is_not(talking: Served) -> None:
    first = create(talking)
    second = create(talking, input="more", previous_response_id=first.id)
    talking.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        talking.client.responses.retrieve(first.id)
    create(talking, input="again", previous_response_id=second.id)
    assert last_prompt(talking).index("hi") < last_prompt(talking).index("again")


def test_responses_that_are_not_to_be_stored_are_not(talking: Served) -> None:
    made = create(talking, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError, match="there is no stored response"):
        talking.client.responses.retrieve(made.id)


@pytest.mark.parametrize("path", ["resp_1", "resp_1/input_items"])
def test_an_unknown_response_is_not_found(talking: Served, path: str) -> None:
    error = refused(talking.http.get(f"{ROUTE}/{path}"), 404)
    assert error["message"].startswith("there is no stored response 'resp_1'")
    error = refused(talking.post(ROUTE, input="hi", previous_response_id="resp_1"), 404)
    assert error["param"] == "previous_response_id"
    assert refused(talking.http.delete(f"{ROUTE}/resp_1"), 404)["message"]


def test_a_response_belongs_to_its_key(talker: ScriptedGenerator) -> None:
    settings = ApiSettings(api_key=(digest("one"), digest("two")))

    def bearer(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    with scripted(talker, settings) as server:

        def post(key: str, **body: Any) -> httpx.Response:
            return server.http.post(ROUTE, json={"input": "hi", **body}, headers=bearer(key))

        made = post("one").json()["id"]
        path = f"{ROUTE}/{made}"
        for method, route in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            assert server.http.request(method, route, headers=bearer("two")).status_code == 404
        assert post("two", previous_response_id=made).status_code == 404
        assert post("one", previous_response_id=made).status_code == 200
        assert server.http.get(path, headers={"x-api-key": "one"}).status_code == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ],
)
def test_pages_are_checked(talking: Served, query: str, param: str) -> None:
    made = create(talking)
    assert refused(talking.http.get(f"{ROUTE}/{made.id}/input_items?{query}"))["param"] == param


def test_a_stored_response_is_not_streamed(talking: Served) -> None:
    made = create(talking)
    assert refused(talking.http.get(f"{ROUTE}/{made.id}?stream=true"))["param"] == "stream"


def test_errors_count_the_items_of_the_request(talking: Served) -> None:
    made = create(talking)
    error = refused(talking.post(ROUTE, input=[{"role": "user"}], previous_response_id=made.id))
    assert error["message"].startswith("input[0].content")


def test_a_server_may_store_nothing(talker: ScriptedGenerator) -> None:
    with scripted(talker, ApiSettings(max_stored_responses=0)) as server:
        asked = server.post(ROUTE, input="hi", store=True)
        assert asked.headers["warning"] == '299 streamserve "without effect: store"'
        assert "warning" not in server.post(ROUTE, input="hi").headers
        assert asked.json()["store"] is False
        assert server.http.get(f"{ROUTE}/{asked.json()['id']}").status_code == 404


def test_a_response_that_is_too_large_says_that_it_is_not_stored(talker: ScriptedGenerator) -> None:
    with scripted(talker, ApiSettings(max_stored_response_bytes=2000)) as server:
        assert create(server).store is True
        assert create(server, input="long " * 500).store is False


@pytest.mark.parametrize(
    ("fields", "template", "expected", "warned"),
    [
        (
            {"effort": "none"},
            "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
            "False",
            False,
        ),
        ({"effort": "high"}, "{{ reasoning_effort }}", "high", False),
        ({"effort": "low"}, "{{ enable_thinking }}", "True", False),
        ({"effort": "low"}, "{{ thinking }}", "True", False),
        ({"effort": "low"}, "", "", True),
        ({"effort": "none"}, "", "", False),
    ],
)
def test_an_effort_is_a_variable_of_the_template(
    talker: ScriptedGenerator,
    tmp_path_factory: pytest.TempPathFactory,
    fields: Any,
    template: str,
    expected: str,
    warned: bool,
) -> None:
    source = f"{{{{ messages[0].content }}}}<{template}>"
    folder = byte_level_folder(tmp_path_factory.mktemp("effort"), chat_template=source)
    with scripted(talker.replaced(tokenizer=Tokenizer.from_folder(folder))) as server:
        response = server.post(ROUTE, input="hi", reasoning=fields)
        assert response.json()["reasoning"] == fields
        assert last_prompt(server) == f"hi<{expected}>"
        assert ("reasoning.effort" in response.headers.get("warning", "")) == warned


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(size: int = 100, owner: str = "") -> StoredResponse:
    return StoredResponse(owner, b"x" * size, (), ())


def test_the_oldest_make_way() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1000)
    for name in "abc":
        assert store.put(name, stored())
    with pytest.raises(RequestError):
        store.get("a", "")
    assert store.put("d", stored(950))
    assert (len(store), store.held) == (1, 950)
    assert not store.put("e", stored(1001))
    assert store.get("d", "")


def test_responses_expire() -> None:
    clock = Clock()
    store = ResponseStore(ttl=10.0, clock=clock)
    store.put("a", stored())
    clock.now = 5.0
    store.put("b", stored())
    clock.now = 10.0
    with pytest.raises(RequestError, match="older than 10 seconds") as error:
        store.get("a", "")
    assert error.value.status == 404
    assert (store.get("b", "").size, store.held) == (100, 100)
