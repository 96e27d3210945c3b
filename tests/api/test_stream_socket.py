"""Prompt streams over a single WebSocket: messages have the bodies of the HTTP routes, and many streams may
be open."""

import json

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from streamserve.api.settings import ApiSettings
from streamserve.protocol import keys
from tests.api.serving import ScriptedGenerator, Served, scripted, until
from tests.api.stream_socket import call, send, socket

GREEDY = {"temperature": 0, "max_tokens": 8}
KEY = "a-key-of-sixteen-characters"


def test_several_streams_at_once(server: Served) -> None:
    texts = [f"text number {number}, " * (number + 1) for number in range(6)]
    with socket(server) as websocket:
        names = []
        for number, text in enumerate(texts):
            reply = call(websocket, "create", request=f"c{number}", body={"query": "why?", **GREEDY})
            assert (reply["request"], reply["status"], reply["body"]["version"]) == (f"c{number}", 200, 0)
            names.append(reply["body"]["id"])
            halves = [text[: len(text) // 2], text[len(text) // 2 :]]
            body = {"version": 0, "operations": [{"op": "append", "text": half} for half in halves]}
            assert call(websocket, "edit", id=names[-1], body=body)["body"]["chunks"] == [
                "chunk-1",
                "chunk-2",
            ]
        for number, name in enumerate(names):
            send(websocket, "finish", id=name, request=f"f{number}", body={"stream": bool(number % 2)})
        answers: dict[str, str] = dict.fromkeys((f"f{number}" for number in range(6)), "")
        done = set()
        while len(done) < 6:
            message = json.loads(websocket.recv(timeout=30))
            reply = message.get("event") or message.get("body")
            if reply and reply["choices"]:
                answers[message["request"]] += reply["choices"][0]["text"]
            if "status" in message:
                assert message["status"] == 200, message
                done.add(message["request"])
    for number, text in enumerate(texts):
        whole = server.post("/v1/completions", prompt=text + "why?", **GREEDY).json()
        assert answers[f"f{number}"] == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("no json", 400),
        ("[]", 400),
        ("[" * 100_000, 400),
        ('{"method": "nonsense"}', 400),
        ('{"method": "create", "body": {"template": ""}}', 400),
        ('{"method": "create", "body": {"model": "other"}}', 404),
        ('{"method": "get", "id": "none"}', 404),
        ('{"method": "edit", "id": "none", "body": {"version": 0, "operations": []}}', 404),
        ('{"method": "finish", "id": "none"}', 404),
        ('{"method": "delete", "id": "none"}', 404),
        ('{"method": "get", "more": 1}', 400),
        (b"\xff\xfe", 400),
        ("", 400),
    ],
)
def test_invalid_messages(server: Served, message: str | bytes, status: int) -> None:
    with socket(server) as websocket:
        websocket.send(message)
        reply = json.loads(websocket.recv(timeout=30))
        assert reply["status"] == status, reply
        assert reply["body"]["error"]["message"]
        assert call(websocket, "create", body=GREEDY)["status"] == 200


def test_its_streams_end_with_it(server: Served) -> None:
    with socket(server) as websocket:
        names = [
            call(websocket, "create", body={**GREEDY, "max_tokens": 3000})["body"]["id"] for _ in range(3)
        ]
        edit = {"version": 0, "operations": [{"op": "append", "text": "hello"}]}
        assert call(websocket, "edit", id=names[0], body=edit)["status"] == 200
        send(websocket, "finish", id=names[0], body={"stream": True})
        assert "event" in json.loads(websocket.recv(timeout=30))
        assert server.metric("streams") >= 3
    until(lambda: all(server.http.get(f"/v1/streams/{name}").status_code == 404 for name in names))
    until(lambda: server.active_sequences() == 0, seconds=30)


def test_a_key_is_required(generator: ScriptedGenerator) -> None:
    settings = ApiSettings(api_key=[keys.digest(KEY)])
    with scripted(generator, settings) as server:
        for shown in ({}, {"Authorization": "Bearer another-key-of-some-length"}):
            with pytest.raises(InvalidStatus) as caught, socket(server, **shown):
                pass
            assert caught.value.response.status_code == 401
        with socket(server, Authorization=f"Bearer {KEY}") as websocket:
            assert call(websocket, "get", id="none")["status"] == 404


def test_pages_of_other_sites_are_refused(server: Served) -> None:
    with pytest.raises(InvalidStatus) as caught, socket(server, Origin="https://elsewhere.example"):
        pass
    assert caught.value.response.status_code == 403


def test_other_paths_have_no_socket(server: Served) -> None:
    with pytest.raises(InvalidStatus), connect(server.url.replace("http", "ws", 1) + "/v1/models"):
        pass


def test_a_message_that_is_too_large(server: Served) -> None:
    def exchange(websocket: ClientConnection) -> None:
        websocket.send("a" * (33 << 20))
        websocket.recv(timeout=30)

    with socket(server) as websocket, pytest.raises(ConnectionClosed):
        exchange(websocket)
    assert server.http.get("/health").status_code == 200
