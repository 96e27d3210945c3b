"""Draining: new requests are refused, open requests run to completion, and health checks fail."""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator

import pytest

from streamserve.api.generator import Item
from streamserve.api.http.drain import RequestGate
from streamserve.api.settings import ApiSettings
from streamserve.protocol.errors import RequestError
from streamserve.protocol.keys import digest
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.serving import ScriptedGenerator, scripted, until

ADMIN = {"Authorization": "Bearer the-admin-key"}
SETTINGS = ApiSettings(admin_key=(digest("the-admin-key"),))


async def test_it_is_idle_when_the_last_request_ends() -> None:
    drain = RequestGate()
    await drain.idle()
    with drain.request(), drain.request():
        waiting = asyncio.ensure_future(drain.idle())
        drain.begin(20.0)
        with pytest.raises(RequestError) as refused, drain.request():
            pass
        assert refused.value.status == 503
        assert 19 < (refused.value.retry_after or 0) <= 20
        await asyncio.sleep(0)
        assert not waiting.done()
        assert drain.open == 2
    await asyncio.wait_for(waiting, 1)
    drain.end()
    with drain.request():
        pass


def test_an_operator_takes_a_server_out_of_service_and_back(generator: ScriptedGenerator) -> None:
    release = threading.Event()

    async def blocking_script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        await asyncio.to_thread(release.wait)
        yield ChoiceDelta(0, "done", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    blocking = generator.replaced(script=blocking_script, submitted=[])
    with scripted(blocking, SETTINGS) as server:
        texts: list[str] = []

        def ask() -> None:
            texts.append(server.post("/v1/completions", prompt="hi").json()["choices"][0]["text"])

        client = threading.Thread(target=ask)
        client.start()
        until(lambda: bool(blocking.submitted))
        state = server.http.post("/admin/drain", headers=ADMIN).json()
        assert state == {"draining": True, "open_requests": 1}
        health = server.http.get("/health")
        assert (health.status_code, health.json()["detail"]) == (503, "draining")
        assert server.http.get("/ping").status_code == 200
        for stream in (False, True):
            refused = server.post("/v1/completions", prompt="hi", stream=stream)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert "draining" in refused.json()["error"]["message"]
        release.set()
        client.join()
        assert texts == ["done"]
        assert server.http.post("/admin/resume", headers=ADMIN).json()["draining"] is False
        assert server.http.get("/health").status_code == 200
        assert server.post("/v1/completions", prompt="hi").status_code == 200


def test_an_operator_takes_one_worker_out_of_service_and_back(generator: ScriptedGenerator) -> None:
    replaced = generator.replaced(drained=[], submitted=[])
    with scripted(replaced, SETTINGS) as server:
        route = "/admin/workers/unified-0"
        reply = server.http.post(f"{route}/drain", headers=ADMIN).json()
        assert reply == {"worker": "unified-0", "draining": True, "open_requests": 0}
        assert server.http.post(f"{route}/resume", headers=ADMIN).json()["draining"] is False
        assert replaced.drained == [("unified-0", True), ("unified-0", False)]
        assert server.http.post("/admin/workers/unknown/drain", headers=ADMIN).status_code == 404
        assert server.http.post(f"{route}/drain").status_code == 401
        assert len(replaced.drained) == 2


def test_an_operator_adds_and_removes_workers(generator: ScriptedGenerator) -> None:
    replaced = generator.replaced(drained=[], removals=[])
    with scripted(replaced, SETTINGS) as server:
        post, delete = server.http.post, server.http.delete
        added = post("/admin/workers", headers=ADMIN, json={"role": "unified", "count": 2})
        assert added.json() == {"workers": ["unified-1", "unified-2"]}
        for body, field in (
            ({}, "role"),
            ({"role": "draft"}, "role"),
            ({"role": "unified", "count": 0}, "count"),
        ):
            refused = post("/admin/workers", headers=ADMIN, json=body)
            assert (refused.status_code, field in refused.json()["error"]["message"]) == (400, True)
        refused = post("/admin/workers", headers=ADMIN, json={"role": "pair"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "role")
        removed = delete("/admin/workers/unified-1?within=2.5", headers=ADMIN)
        assert removed.json() == {"workers": ["unified-1"], "open_requests": 3}
        assert delete("/admin/workers/unified-1", headers=ADMIN).status_code == 200
        assert replaced.removals == [("unified-1", 2.5), ("unified-1", math.inf)]
        assert delete("/admin/workers/unified-9", headers=ADMIN).status_code == 404
        for within in ("-1", "soon", "inf", "nan"):
            refused = delete(f"/admin/workers/unified-1?within={within}", headers=ADMIN)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "within")
        refused = delete("/admin/workers/unified-1?wthin=0", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "wthin")
        assert refused.json()["error"]["message"] == (
            "wthin is not a known query parameter: did you mean within?"
        )
        assert len(replaced.removals) == 2
        assert post("/admin/workers", json={"role": "unified"}).status_code == 401
    with scripted(generator) as server:
        for refused in (
            server.post("/admin/workers", role="unified"),
            server.http.delete("/admin/workers/unified-1"),
        ):
            assert refused.status_code == 403
            assert "--admin-key-file" in refused.json()["error"]["message"]
