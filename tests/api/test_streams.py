"""Prompts that arrive in chunks over HTTP are answered like complete prompts."""

import json
import time
from typing import Any

import httpx
import pytest

from streamserve.api.settings import ApiSettings
from tests.api.serving import Served, until

GREEDY = {"temperature": 0, "max_tokens": 8}


def create(server: Served, **fields: Any) -> str:
    reply = server.post("/v1/streams", **{**GREEDY, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["version"] == 0
    return str(reply.json()["id"])


def edit(
    server: Served, name: str, version: int, *operations: dict[str, Any], **headers: str
) -> httpx.Response:
    body = {"version": version, "operations": list(operations)}
    return server.http.patch(f"/v1/streams/{name}", json=body, headers=headers)


def append(server: Served, name: str, version: int, *texts: str) -> list[str]:
    reply = edit(server, name, version, *({"op": "append", "text": text} for text in texts))
    assert reply.status_code == 200, reply.text
    assert reply.json()["version"] == version + 1
    return list(reply.json()["chunks"])


def finish(server: Served, name: str, **body: Any) -> httpx.Response:
    return server.post(f"/v1/streams/{name}/finish", **body)


def state(server: Served, name: str) -> dict[str, Any]:
    reply = server.http.get(f"/v1/streams/{name}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def without_names(reply: httpx.Response) -> dict[str, Any]:
    """Return a response without its ids, so that repeated requests can be compared."""
    body = dict(reply.json())
    body.pop("id")
    body.pop("created")
    body["usage"].pop("prompt_tokens_details")
    return body


def test_a_text(server: Served) -> None:
    name = create(
        server, template="Read: {context}\n\nQ: {query}", query="what, then?", logprobs=2, n=2, seed=3
    )
    first, second = append(server, name, 0, "the quick br", "own fox jumps")
    assert edit(server, name, 1, {"op": "insert", "chunk": second, "text": "o"}).json()["chunks"] == [
        "chunk-3"
    ]
    assert edit(server, name, 2, {"op": "replace", "index": 0, "text": "Grüße, br"}).json()["chunks"] == [
        first
    ]
    shown = state(server, name)
    assert (shown["version"], shown["status"], shown["model"]) == (3, "open", "tiny")
    assert [(chunk["id"], chunk["characters"]) for chunk in shown["chunks"]] == [
        (first, 9),
        ("chunk-3", 1),
        (second, 13),
    ]
    until(lambda: state(server, name)["computed"] >= shown["tokens"] - 1, seconds=30)
    reply = finish(server, name)
    prompt = "Read: Grüße, broown fox jumps\n\nQ: what, then?"
    whole = server.post("/v1/completions", prompt=prompt, logprobs=2, n=2, seed=3, **GREEDY)
    assert without_names(reply) == without_names(whole)
    assert reply.json()["usage"]["prompt_tokens"] == shown["tokens"]
    assert server.http.get(f"/v1/streams/{name}").status_code == 404


def test_a_chat(server: Served) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "{query}\n{context} "},
    ]
    name = create(server, messages=messages, query="Who {context}?", logprobs=True, top_logprobs=1)
    append(server, name, 0, " one ", "two ", "{query} ")
    reply = finish(server, name)
    messages[1]["content"] = "Who {context}?\n one two {query}  "
    whole = server.post("/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=1, **GREEDY)
    assert without_names(reply) == without_names(whole)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_events(server: Served, kind: str) -> None:
    fields: dict[str, Any] = {}
    if kind == "chat":
        fields = {"messages": [{"role": "user", "content": "{context}"}]}
    name = create(server, stream_options={"include_usage": True}, stream=True, **fields)
    append(server, name, 0, "hello")
    streamed = events(finish(server, name))
    if kind == "chat":
        messages = [{"role": "user", "content": "hello"}]
        whole = server.post("/v1/chat/completions", messages=messages, **GREEDY).json()
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in streamed[:-1])
        assert text == whole["choices"][0]["message"]["content"]
    else:
        whole = server.post("/v1/completions", prompt="hello", **GREEDY).json()
        assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == whole["choices"][0]["text"]
    assert streamed[-1]["usage"]["completion_tokens"] == 8
    assert not server.http.get(f"/v1/streams/{name}").is_success


def test_the_context_is_computed_before_it_is_finished(server: Served) -> None:
    early = server.metric("stream_early_tokens_total")
    void = server.metric("stream_invalidated_tokens_total")
    chunks = server.metric("stream_chunks_total")
    from_creation = server.metric("stream_time_to_first_token_seconds_count")
    name = create(server, query=" and why?")
    append(server, name, 0, "word after word, " * 20)
    until(lambda: state(server, name)["computed"] > 50, seconds=30)
    assert server.metric("streams") >= 1
    assert edit(server, name, 1, {"op": "replace", "index": 0, "text": "word, "}).is_success
    until(lambda: server.metric("stream_invalidated_tokens_total") > void, seconds=30)
    append(server, name, 2, "yet another, " * 10)
    tokens = state(server, name)["tokens"]
    until(lambda: state(server, name)["computed"] > tokens // 2, seconds=30)
    assert finish(server, name).status_code == 200
    until(lambda: server.metric("stream_early_tokens_total") > early + tokens // 2, seconds=30)
    assert server.metric("stream_chunks_total") == chunks + 2
    assert server.metric("stream_time_to_first_token_seconds_count") == from_creation + 1


def test_the_time_until_a_first_chunk_came_is_no_part_of_the_queue(server: Served) -> None:
    """The queue time of a prompt counts from its finish, so waiting for the first chunk does not count."""

    def seconds(of: str) -> float:
        return server.metric(f"{of}_seconds_sum")

    def parts() -> float:
        return sum(seconds(f"request_{part}_time") for part in ("queue", "prefill", "decode"))

    name = create(server)
    time.sleep(1.0)
    append(server, name, 0, "hello")
    until(lambda: state(server, name)["computed"] > 0)
    before, whole = parts(), seconds("e2e_request_latency")
    assert finish(server, name).status_code == 200
    assert 0 < parts() - before <= seconds("e2e_request_latency") - whole


def test_an_edit_for_another_version_changes_nothing(server: Served) -> None:
    name = create(server)
    append(server, name, 0, "a")
    before = state(server, name)
    for version in (0, 2):
        reply = edit(server, name, version, {"op": "append", "text": "b"})
        assert reply.status_code == 409
        error = reply.json()["error"]
        assert (error["code"], error["version"], error["param"]) == ("stale_version", 1, "version")
    assert finish(server, name, version=0).status_code == 409
    after = state(server, name)
    assert {**after, "computed": 0} == {**before, "computed": 0}
    assert server.http.delete(f"/v1/streams/{name}").json() == {"id": name, "deleted": True}
    assert server.http.delete(f"/v1/streams/{name}").status_code == 404


def test_a_retry_with_the_same_key_does_nothing_twice(server: Served) -> None:
    body = {"query": "x", **GREEDY}
    created = [
        server.http.post("/v1/streams", json=body, headers={"Idempotency-Key": "c1"}) for _ in range(2)
    ]
    assert created[0].json() == created[1].json()
    name = created[0].json()["id"]
    operation = {"op": "append", "text": "a"}
    edits = [edit(server, name, 0, operation, **{"Idempotency-Key": "e1"}) for _ in range(3)]
    assert {reply.text for reply in edits} == {edits[0].text}
    assert state(server, name)["version"] == 1
    other = edit(server, name, 1, operation, **{"Idempotency-Key": "e1"})
    assert (other.status_code, state(server, name)["version"]) == (409, 1)
    headers = {"Idempotency-Key": "f1"}
    answers = [server.http.post(f"/v1/streams/{name}/finish", json={}, headers=headers) for _ in range(2)]
    assert answers[0].status_code == 200
    assert answers[0].text == answers[1].text


def test_any_body_may_have_a_key(server: Served) -> None:
    headers = {"Idempotency-Key": "odd"}
    body = {"messages": [{"role": "user", "content": "{context}"}], "chat_template_kwargs": {"a": 2**70}}
    name = server.http.post("/v1/streams", json=body, headers=headers).json()["id"]
    assert server.http.delete(f"/v1/streams/{name}").status_code == 200


def test_what_failed_may_be_tried_again_with_its_key(server: Served) -> None:
    name = create(server)
    for _ in range(2):
        assert (
            edit(server, name, 5, {"op": "remove", "index": 0}, **{"Idempotency-Key": "k"}).status_code == 409
        )
    assert edit(server, name, 0, {"op": "append", "text": "a"}, **{"Idempotency-Key": "k"}).status_code == 200
    server.http.delete(f"/v1/streams/{name}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": "no place for it"}, "template"),
        ({"template": "{context}", "query": "x"}, "query"),
        ({"template": "{context} {context}"}, "template"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "{context}"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "none"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "{context}"}], "template": "{context}"}, "template"),
        ({"messages": [{"role": "user", "content": "{context}"}], "logprobs": 3}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"prompt": "a"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_streams_that_cannot_be(server: Served, fields: dict[str, Any], param: str) -> None:
    open_before = server.metric("streams")  # those of earlier tests may end meanwhile
    reply = server.post("/v1/streams", **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert server.metric("streams") <= open_before


def test_edits_that_cannot_be_change_nothing(server: Served) -> None:
    name = create(server)
    append(server, name, 0, "a", "b")
    append_c = {"op": "append", "text": "c"}
    for wrong in (
        {"op": "append"},
        {"op": "prepend", "text": "c"},
        {"op": "remove", "index": 9},
        {"op": "remove", "index": "0"},
        {"op": "insert", "text": "c", "index": 0, "chunk": "chunk-1"},
        {"op": "append", "text": "c", "more": 1},
        {"op": "append", "text": "a b " * 100_000},
        {"op": "append", "text": "日" * 9000},
    ):
        reply = edit(server, name, 1, append_c, wrong)
        assert reply.status_code == 400, (wrong, reply.text[:200])
        assert reply.json()["error"]["param"] == "operations"
    assert edit(server, name, 1).status_code == 400
    assert edit(server, name, 1, *[append_c] * 1025).status_code == 400
    shown = state(server, name)
    assert (shown["version"], len(shown["chunks"])) == (1, 2)
    assert finish(server, name, version=1).json()["choices"][0]["text"]


def test_an_empty_prompt_and_one_that_is_too_long(server: Served) -> None:
    name = create(server, add_special_tokens=False, max_tokens=4096)
    assert "empty" in finish(server, name).json()["error"]["message"]
    append(server, name, 0, "a b c d e f g h")
    reply = finish(server, name)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
    assert state(server, name)["status"] == "open"
    server.http.delete(f"/v1/streams/{name}")


def test_deleting_a_stream_that_is_being_answered(server: Served) -> None:
    name = create(server, max_tokens=3000)
    append(server, name, 0, "hello")
    with server.http.stream("POST", f"/v1/streams/{name}/finish", json={"stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        assert state(server, name)["status"] == "answering"
        assert edit(server, name, 1, {"op": "append", "text": "b"}).status_code == 409
        assert finish(server, name).status_code == 409
        assert server.http.delete(f"/v1/streams/{name}").status_code == 200
        assert any("was closed" in line for line in lines)
    until(lambda: server.active_sequences() == 0, seconds=30)


def test_a_client_that_hangs_up_ends_its_stream(server: Served) -> None:
    name = create(server, max_tokens=3000)
    append(server, name, 0, "hello")
    with server.http.stream("POST", f"/v1/streams/{name}/finish", json={"stream": True}) as reply:
        next(reply.iter_lines())
    until(lambda: server.http.get(f"/v1/streams/{name}").status_code == 404, seconds=30)
    until(lambda: server.active_sequences() == 0, seconds=30)


def test_settings_have_bounds() -> None:
    assert ApiSettings().max_streams > 0
    assert ApiSettings().stream_ttl > 0
