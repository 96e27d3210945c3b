"""Early answers to an open prompt stream are final if the prompt does not change, and withdrawn if it
does."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.api.serving import Served, until
from tests.api.stream_socket import call, send, socket
from tests.api.words import WORDS
from tests.conftest import Scale

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
WITHDRAWN = "prompt_stream.withdrawn"


@asynccontextmanager
async def opened(server: Served, **fields: Any) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a connection, and the path of a stream that is answered early."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        reply = await http.post("/v1/streams", json={"answer_early": True, **GREEDY, **fields})
        assert reply.status_code == 200, reply.text
        path = f"/v1/streams/{reply.json()['id']}"
        try:
            yield http, path
        finally:
            await http.delete(path)


async def edit(http: httpx.AsyncClient, path: str, version: int, **operation: Any) -> None:
    reply = await http.patch(path, json={"version": version, "operations": [operation]})
    assert reply.status_code == 200, reply.text


class Reader:
    """Reads an early answer; `text` is the part that was not withdrawn."""

    def __init__(self, http: httpx.AsyncClient, path: str, **body: Any) -> None:
        self.text = ""
        self.withdrawn: list[int] = []
        self.last: dict[str, Any] = {}
        self.began, self.changed = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._read(http, path, body))

    async def _read(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        async with http.stream("POST", f"{path}/answer", json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                data = line.removeprefix("data: ")
                if data and data != "[DONE]":
                    self._handle(json.loads(data))

    def _handle(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        self.last = event
        if event["object"] == WITHDRAWN:
            self.withdrawn.append(event["version"])
            self.text = ""
            self.began.clear()
            self.changed.set()
            return
        for choice in event["choices"]:
            self.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.began.set()


async def whole(http: httpx.AsyncClient, prompt: str, **fields: Any) -> str:
    reply = await http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
    return str(reply.json()["choices"][0]["text"])


async def test_it_is_final_if_nothing_changes(server: Served) -> None:
    async with opened(server, query=" why?") as (http, path):
        reader = Reader(http, path, stream_options={"include_usage": True})
        await edit(http, path, 0, op="append", text="Tom has 8 apples.")
        await asyncio.wait_for(reader.began.wait(), 30)
        assert (await http.get(path)).json()["status"] == "open"
        reply = await http.post(f"{path}/finish", json={"stream": True})
        assert reply.json() == {"id": path.rpartition("/")[2], "object": "prompt_stream", "version": 1}
        await reader.task
        assert reader.text == await whole(http, "Tom has 8 apples. why?")
        usage = reader.last["usage"]
        assert usage["completion_tokens"] == GREEDY["max_tokens"]
        assert (await http.get(path)).status_code == 404


@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_it_is_withdrawn_if_the_context_changes(server: Served, kind: str) -> None:
    void = server.metric("stream_withdrawn_tokens_total")
    response_format = {"messages": [{"role": "user", "content": "{context}?"}]} if kind == "chat" else {}
    async with opened(server, **response_format) as (http, path):
        await edit(http, path, 0, op="append", text="Tom has 8 apples.")
        reader = Reader(http, path)
        await asyncio.wait_for(reader.began.wait(), 30)
        await edit(http, path, 1, op="append", text=" Anna has none.")
        await asyncio.wait_for(reader.changed.wait(), 30)
        await asyncio.wait_for(reader.began.wait(), 30)
        await http.post(f"{path}/finish", json={"version": 2})
        await reader.task
        assert reader.withdrawn == [2]
        if kind == "chat":
            body = {"messages": [{"role": "user", "content": "Tom has 8 apples. Anna has none.?"}], **GREEDY}
            reply = (await http.post("/v1/chat/completions", json=body)).json()
            assert reader.text == reply["choices"][0]["message"]["content"]
        else:
            assert reader.text == await whole(http, "Tom has 8 apples. Anna has none.")
    until(lambda: server.metric("stream_withdrawn_tokens_total") > void, seconds=20)


@pytest.mark.parametrize("events", [False, True])
async def test_without_a_reader_it_comes_when_the_prompt_is_finished(server: Served, events: bool) -> None:
    async with opened(server) as (http, path):
        await edit(http, path, 0, op="append", text="One.")
        await edit(http, path, 1, op="replace", index=0, text="Two.")
        reply = await http.post(f"{path}/finish", json={"stream": events})
        if events:
            lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
            pieces = [json.loads(line) for line in lines[:-1]]
        else:
            pieces = [reply.json()]
        text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
        assert text == await whole(http, "Two.")


async def test_refusals(server: Served) -> None:
    async with opened(server, answer_early=False) as (http, path):
        assert (await http.post(f"{path}/answer", json={})).status_code == 409
        refused = await http.post("/v1/streams", json={"answer_early": True, "stop": ["a"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")
        assert (await http.post("/v1/streams/none/answer", json={})).status_code == 404
    async with opened(server) as (http, path):
        empty = await http.post(f"{path}/finish", json={})
        assert (empty.status_code, (await http.get(path)).json()["status"]) == (400, "open")
        await edit(http, path, 0, op="append", text="One.")
        reader = Reader(http, path)
        await asyncio.wait_for(reader.began.wait(), 30)
        assert (await http.post(f"{path}/answer", json={})).status_code == 409
        await http.post(f"{path}/finish", json={})
        await reader.task
        assert reader.text == await whole(http, "One.")


async def test_hanging_up_ends_the_stream(server: Served) -> None:
    before, active_sequences = server.metric("streams"), server.active_sequences()
    async with opened(server, max_tokens=1000) as (http, path):
        await edit(http, path, 0, op="append", text="One.")
        reader = Reader(http, path)
        await asyncio.wait_for(reader.began.wait(), 30)
        reader.task.cancel()
        await asyncio.gather(reader.task, return_exceptions=True)
        async with asyncio.timeout(30):
            while (await http.get(path)).status_code != 404:  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
    await asyncio.to_thread(until, lambda: server.metric("streams") <= before, 30)
    await asyncio.to_thread(until, lambda: server.active_sequences() <= active_sequences, 30)


async def test_the_text_is_that_of_the_final_prompt(
    server: Served, scale: Scale, record: Callable[..., None]
) -> None:
    """The final text equals the answer to the final prompt: each early answer is read while random edits
    arrive."""
    count, rng = scale.pick(12, 120), random.Random(scale.seed + 2)
    withdrawn, limit = 0, asyncio.Semaphore(8)

    async def one(script: random.Random) -> None:
        nonlocal withdrawn
        fields = {"seed": script.randrange(99), "temperature": script.choice([0, 1])}
        async with limit, opened(server, query="why?", **fields) as (http, path):
            reader, chunks = Reader(http, path), list[str]()
            for version in range(script.randint(1, 6)):
                text, index = "".join(script.choices(WORDS, k=6)), script.randrange(len(chunks) + 1)
                chunks.insert(index, text)
                await edit(http, path, version, op="insert", index=index, text=text)
                if version == 0 or script.random() < 0.5:  # at first: a finished stream cannot be read
                    await asyncio.wait_for(reader.began.wait(), 60)
            assert (await http.post(f"{path}/finish", json={})).status_code == 200
            await reader.task
            withdrawn += len(reader.withdrawn)
            assert reader.text == await whole(http, "".join(chunks) + "why?", **fields)

    await asyncio.gather(*(one(random.Random(rng.randrange(2**31))) for _ in range(count)))
    record(scripts=count, withdrawn=withdrawn)
    assert withdrawn > 0


def test_over_a_socket(server: Served) -> None:
    with socket(server) as websocket:
        name = call(websocket, "create", body={"answer_early": True, **GREEDY})["body"]["id"]
        operations = [{"op": "append", "text": "hello"}]
        call(websocket, "edit", id=name, body={"version": 0, "operations": operations})
        send(websocket, "answer", request="a", id=name)
        message, objects, text = json.loads(websocket.recv(timeout=30)), [], ""
        send(websocket, "edit", id=name, body={"version": 1, "operations": operations})
        while not objects or objects[-1] != WITHDRAWN:
            if "event" in message:
                objects.append(message["event"]["object"])
            message = json.loads(websocket.recv(timeout=30))
        send(websocket, "finish", request="f", id=name)
        while message != {"request": "a", "status": 200}:
            if message.get("request") == "f":
                assert message["body"]["version"] == 2
            if "event" in message:
                text += "".join(choice["text"] for choice in message["event"]["choices"])
            message = json.loads(websocket.recv(timeout=30))
    whole = server.post("/v1/completions", prompt="hellohello", **GREEDY).json()
    assert text == whole["choices"][0]["text"]
