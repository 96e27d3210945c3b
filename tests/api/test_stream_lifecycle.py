"""Prompt streams may be numerous, expire, be abandoned, be edited concurrently, or be open during a drain."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from streamserve.api.generator import Generator
from streamserve.api.prompt_streams import streams
from streamserve.api.settings import ApiSettings
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol import keys
from streamserve.settings.resolve import resolve
from tests.api.serving import ON_PAIRS, ScriptedGenerator, Served, scripted, served, until
from tests.api.words import WORDS
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.reports import newer_reports

TTL = 3.0
MAX_STREAMS = 96
"""Maximum number of open streams. An expired stream occupies its slot for TTL seconds."""
SHORT = {"max_position_embeddings": 512}
ADMIN_PREFIX = "an-admin-key-of-some-length"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with little memory."""
    with little_memory(make_checkpoint(tmp_path_factory.mktemp("model"), **SHORT)) as running:
        yield running


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with little memory that runs a stream pair."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), **SHORT)
    with little_memory(folder, {"pairs": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def expiring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with little memory where streams expire soon."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), **SHORT)
    with little_memory(folder, max_streams=MAX_STREAMS, stream_ttl=TTL) as running:
        yield running


def little_memory(
    folder: Path, pools: dict[str, Any] | None = None, **settings: Any
) -> AbstractContextManager[Served]:
    """A server with the real engine and so little memory that it preempts now and then."""
    model = {"served_model_name": ["tiny"], "threads": 1, "num_blocks": 96, "preempt_every": 7}

    async def start() -> Generator:
        llm = AsyncLLM(resolve(str(folder), model | (pools or {})))
        await llm.start()
        await llm.until_ready()
        return llm

    sampling = {"temperature": 0.0, "ignore_eos": True}
    admin = [keys.digest(ADMIN_PREFIX)]
    return served(start, ApiSettings(default_sampling=sampling, admin_key=admin, **settings))


class StreamExpired(Exception):
    """Raised if a stream expired before an edit, since an edit may take longer than the stream's lifetime on
    a busy machine."""


async def scripted_stream(http: httpx.AsyncClient, rng: random.Random, **fields: Any) -> tuple[str, str, int]:
    """Open a stream and apply random edits to it; return its id, its context and its version."""
    reply = await http.post("/v1/streams", json=fields)
    assert reply.status_code == 200, reply.text
    name, version = reply.json()["id"], 0
    chunks: list[str] = []
    for _ in range(rng.randint(1, 6)):
        operations: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 3)):
            text, index = "".join(rng.choices(WORDS, k=rng.randint(1, 12))), rng.randrange(len(chunks) + 1)
            kind = rng.choice(["append", "append", "insert", "replace", "remove"])
            if kind == "append":
                chunks.append(text)
                operations.append({"op": "append", "text": text})
            elif kind == "insert":
                chunks.insert(index, text)
                operations.append({"op": "insert", "text": text, "index": index})
            elif index < len(chunks):
                chunks[index : index + 1] = [text] if kind == "replace" else []
                given = {"text": text} if kind == "replace" else {}
                operations.append({"op": kind, "index": index, **given})
        if operations:
            body = {"version": version, "operations": operations}
            reply = await http.patch(f"/v1/streams/{name}", json=body)
            if reply.status_code == 404:
                raise StreamExpired(reply.text)
            assert reply.status_code == 200, reply.text
            version += 1
        await asyncio.sleep(rng.choice([0, 0, 0.01, 0.03]))
    return name, "".join(chunks), version


@pytest.mark.parametrize("where", ["small", "pair"])
def test_texts_equal_those_of_complete_prompts(
    where: str, request: pytest.FixtureRequest, scale: Scale, record: Callable[..., None]
) -> None:
    """Texts equal the answers to complete prompts, with concurrent random edits, little memory and forced
    preemptions."""
    small: Served = request.getfixturevalue(where)
    count, rng = scale.pick(12 if where == "small" else 6, 160), random.Random(scale.seed)
    until(lambda: small.llm.report() is not None)  # for a server that has just started
    preempted = small.llm.report().preemptions

    async def one(http: httpx.AsyncClient, seed: int, limit: asyncio.Semaphore) -> None:
        script = random.Random(seed)
        sampling = {"max_tokens": script.randint(1, 24), "seed": seed, "temperature": script.choice([0, 1])}
        query = script.choice(["", " why?", "日本 ?"])
        async with limit:
            name, context, version = await scripted_stream(http, script, query=query, **sampling)
            body = {"version": version} if script.random() < 0.5 else {}
            answer = await http.post(f"/v1/streams/{name}/finish", json=body)
            prompt = {"prompt": context + query, **sampling}
            whole = await http.post("/v1/completions", json=prompt)
        assert answer.status_code == whole.status_code == (200 if context + query else 400), answer.text
        if not context + query:
            return
        assert answer.json()["choices"] == whole.json()["choices"], context
        assert answer.json()["usage"]["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]

    async def main() -> None:
        limit = asyncio.Semaphore(12)
        async with httpx.AsyncClient(base_url=small.url, timeout=120) as http:
            await asyncio.gather(*(one(http, rng.randrange(2**31), limit) for _ in range(count)))

    asyncio.run(main())
    reported = newer_reports(small.llm)
    until(lambda: reported() and small.llm.report().preemptions > preempted, seconds=20)
    transfer = small.llm.report().transfer
    assert (transfer is not None and transfer.handed_over > 0) == (where == "pair" or ON_PAIRS)
    record(scripts=count, preempted=small.llm.report().preemptions - preempted)


@pytest.mark.parametrize("quarter", range(4))
def test_abandoned_streams_leave_nothing(
    quarter: int, expiring: Served, scale: Scale, record: Callable[..., None]
) -> None:
    """Streams that are left open, deleted, or disconnected while edited or answered hold no resources in the
    end. A full run has 10,000 streams, in quarters that can be run separately."""
    if quarter and not scale.full:
        pytest.skip("a small run has one quarter")
    count, rng = scale.pick(40, 1000), random.Random(scale.seed + 1 + quarter)
    ends: dict[str, int] = {}
    expired: list[int] = []

    async def one(http: httpx.AsyncClient, seed: int, limit: asyncio.Semaphore) -> None:
        script = random.Random(seed)
        how = script.choice(["forget", "delete", "hang up", "hang up early", "finish"])
        ends[how] = ends.get(how, 0) + 1
        async with limit:
            while (await http.get("/load")).json()["server_load"] > MAX_STREAMS // 2:  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0.05)
            try:
                name, _, _ = await scripted_stream(
                    http, script, query="why?", max_tokens=script.choice([2, 200])
                )
            except StreamExpired:
                expired.append(seed)
                return
            if how == "delete":
                assert (await http.delete(f"/v1/streams/{name}")).status_code in (200, 404)
            elif how == "finish":
                assert (await http.post(f"/v1/streams/{name}/finish", json={})).status_code in (200, 404)
            elif how != "forget":
                body = {"stream": how == "hang up"}
                wait = 30 if how == "hang up" else script.choice([0.001, 0.01])
                try:
                    async with http.stream(
                        "POST", f"/v1/streams/{name}/finish", json=body, timeout=wait
                    ) as reply:
                        await anext(reply.aiter_lines())
                except httpx.TimeoutException:
                    pass

    async def main() -> None:
        limit = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=expiring.url, timeout=120) as http:
            await asyncio.gather(*(one(http, rng.randrange(2**31), limit) for _ in range(count)))

    asyncio.run(main())
    until(lambda: expiring.metric("streams") == 0, seconds=60)
    until(lambda: expiring.active_sequences() == 0 and expiring.llm.report().blocks_live == 0, seconds=60)
    until(lambda: expiring.http.get("/load").json()["server_load"] == 0, seconds=20)
    assert len(ends) == 5
    assert len(expired) < count // 4
    record(
        streams=count,
        expired=len(expired),
        **{name.replace(" ", "_"): number for name, number in ends.items()},
    )


def test_edits_at_the_same_time(small: Served) -> None:
    """Of concurrent edits to the same version only one is applied; the others get an error with the current
    version."""

    async def main() -> tuple[list[httpx.Response], dict[str, Any]]:
        async with httpx.AsyncClient(base_url=small.url, timeout=60) as http:
            name = (await http.post("/v1/streams", json={})).json()["id"]
            bodies = [{"version": 0, "operations": [{"op": "append", "text": f"{n}"}]} for n in range(10)]
            replies = await asyncio.gather(*(http.patch(f"/v1/streams/{name}", json=body) for body in bodies))
            return list(replies), (await http.get(f"/v1/streams/{name}")).json()

    replies, shown = asyncio.run(main())
    assert sorted(reply.status_code for reply in replies) == [200] + [409] * 9
    assert {reply.json()["error"]["version"] for reply in replies if reply.status_code == 409} == {1}
    assert (shown["version"], len(shown["chunks"])) == (1, 1)


def test_no_more_than_the_limit(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(max_streams=3)) as server:
        names = [server.http.post("/v1/streams", json={}).json()["id"] for _ in range(3)]
        refused = server.http.post("/v1/streams", json={})
        assert refused.status_code == 429
        assert "max_streams" in refused.json()["error"]["message"]
        assert int(refused.headers["Retry-After"]) > 0
        assert server.http.delete(f"/v1/streams/{names[0]}").is_success
        assert server.http.post("/v1/streams", json={}).status_code == 200


def test_a_stream_expires_unless_it_is_used(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(stream_ttl=1.5)) as server:
        name, other = (server.http.post("/v1/streams", json={}).json()["id"] for _ in range(2))
        until(lambda: server.http.get(f"/v1/streams/{name}").is_success and server.metric("streams") == 1, 60)
        assert server.http.get(f"/v1/streams/{other}").status_code == 404
        until(lambda: server.metric("streams") == 0, 60)
        assert server.http.get(f"/v1/streams/{name}").status_code == 404


def test_a_draining_server_takes_no_new_streams_and_answers_the_open_ones(small: Served) -> None:
    name = small.http.post("/v1/streams", json={"max_tokens": 3}).json()["id"]
    admin = {"Authorization": f"Bearer {ADMIN_PREFIX}"}
    assert small.http.post("/admin/drain", headers=admin).is_success
    try:
        assert small.http.post("/v1/streams", json={}).status_code == 503
        body = {"version": 0, "operations": [{"op": "append", "text": "hello"}]}
        assert small.http.patch(f"/v1/streams/{name}", json=body).status_code == 200
        assert small.http.post(f"/v1/streams/{name}/finish", json={}).status_code == 200
    finally:
        assert small.http.post("/admin/resume", headers=admin).is_success


def test_an_idle_stream_does_not_keep_a_draining_server_waiting(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_IN_USE_SECONDS", 0.3)
    with scripted(generator, ApiSettings()) as server:
        open_requests = lambda: server.http.get("/load").json()["server_load"]  # noqa: E731
        name = server.http.post("/v1/streams", json={}).json()["id"]
        assert open_requests() == 1, "in use"
        until(lambda: open_requests() == 0, 60)
        body = {"version": 0, "operations": [{"op": "append", "text": "hello"}]}
        assert server.http.patch(f"/v1/streams/{name}", json=body).status_code == 200
        assert open_requests() == 1, "in use again"
        assert server.http.post(f"/v1/streams/{name}/finish", json={}).status_code == 200
        assert open_requests() == 0, "a finished stream stops counting at once"


def test_all_streams_together_hold_a_bounded_memory(generator: ScriptedGenerator) -> None:
    """An open stream holds memory for its chunks, their joined text and its tokens. All streams together are
    limited."""
    wide = generator.replaced(model=msgspec.structs.replace(generator.model, max_model_len=1 << 20))
    with scripted(wide, ApiSettings(max_memory_bytes=80 << 20)) as server:
        names = [server.http.post("/v1/streams", json={}).json()["id"] for _ in range(4)]
        body = {"version": 0, "operations": [{"op": "append", "text": "ab " * 100_000}]}
        replies = [server.http.patch(f"/v1/streams/{name}", json=body) for name in names]
        assert [reply.status_code for reply in replies] == [200] * 3 + [429]
        assert "max_memory_bytes" in replies[-1].json()["error"]["message"]
        assert server.http.get(f"/v1/streams/{names[-1]}").json()["version"] == 0
        assert server.http.delete(f"/v1/streams/{names[0]}").is_success
        assert server.http.patch(f"/v1/streams/{names[-1]}", json=body).status_code == 200
