"""Authentication: with keys set, every route requires one, except the health checks."""

import asyncio
import base64
import io
import logging
import threading
from collections.abc import AsyncGenerator, Iterator

import httpx
import msgspec
import openai
import pytest
from starlette.routing import Route

from streamserve.api.app import create_app
from streamserve.api.generator import Item
from streamserve.api.http.auth import ASSETS_PREFIX, PUBLIC_PATHS
from streamserve.api.settings import ApiSettings
from streamserve.protocol.keys import digest
from streamserve.protocol.sampling import SamplingParams
from streamserve.system.logs import TextFormatter
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.serving import ScriptedGenerator, Served, scripted, until

KEY, OTHER_KEY, ADMIN_KEY = "a-key-of-the-test", "another-key", "the-admin-key"
SETTINGS = ApiSettings(api_key=(digest(KEY), digest(OTHER_KEY)), admin_key=(digest(ADMIN_KEY),))


@pytest.fixture(scope="module")
def locked(generator: ScriptedGenerator) -> Iterator[Served]:
    with scripted(generator, SETTINGS) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def all_routes(generator: ScriptedGenerator) -> set[tuple[str, str]]:
    """Method and path of every route of the application."""
    routes = [route for route in create_app(generator).routes if isinstance(route, Route)]
    return {(method, route.path) for route in routes for method in route.methods or ()}


def test_every_route_but_those_of_health_and_the_page_requires_a_key(
    locked: Served, generator: ScriptedGenerator
) -> None:
    routes, submitted_before = all_routes(generator), len(generator.submitted)
    assert {("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/")} <= routes
    assert {("POST", "/admin/drain"), ("POST", "/admin/resume")} <= routes
    assert {path for _, path in routes} >= PUBLIC_PATHS
    for method, path in sorted(routes):
        for headers in ({}, bearer("wrong"), bearer(SETTINGS.api_key[0]), {"Authorization": f"Basic {KEY}"}):
            reply = locked.http.request(method, path.replace("{name:path}", "scripted"), headers=headers)
            if path in PUBLIC_PATHS:
                assert reply.status_code == 200, (method, path)
            elif path.startswith(ASSETS_PREFIX):
                assert reply.status_code == 404, (method, path)
            else:
                assert reply.status_code == 401, (method, path, headers)
                assert reply.headers["WWW-Authenticate"] in ("Bearer", "Basic")
    assert len(generator.submitted) == submitted_before


def test_routes_that_do_not_exist_require_a_key_too(locked: Served) -> None:
    assert locked.http.get("/v1/nothing").status_code == 401
    assert locked.http.get("/health/").status_code == 401
    assert locked.http.options("/v1/completions").status_code == 401


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_each_of_several_keys_opens(locked: Served, key: str) -> None:
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model="scripted", prompt="hi").choices[0].text == "hello"


def test_a_key_may_come_as_x_api_key(locked: Served) -> None:
    def status(headers: dict[str, str]) -> int:
        return locked.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers).status_code

    assert (status({}), status({"X-Api-Key": "wrong"}), status({"X-Api-Key": KEY})) == (401, 401, 200)
    # If both headers are sent, only the key in Authorization is checked.
    assert status({**bearer("wrong"), "X-Api-Key": KEY}) == 401


def test_the_client_sees_an_authentication_error(locked: Served) -> None:
    client = openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as error:
        client.completions.create(model="scripted", prompt="hi")
    assert error.value.code == "invalid_api_key"


def test_admin_routes_take_only_the_admin_key(locked: Served) -> None:
    assert locked.http.post("/admin/resume", headers=bearer(KEY)).status_code == 401
    assert locked.http.post("/admin/resume", headers=bearer(ADMIN_KEY)).status_code == 200
    assert locked.http.get("/v1/models", headers=bearer(ADMIN_KEY)).status_code == 401


def test_admin_routes_are_closed_without_an_admin_key(generator: ScriptedGenerator) -> None:
    with scripted(generator) as server:
        reply = server.http.post("/admin/drain", headers=bearer(KEY))
        assert reply.status_code == 403
        assert "--admin-key-file" in reply.json()["error"]["message"]
        assert server.http.get("/health").status_code == 200
    with scripted(generator, ApiSettings(api_key=(digest(KEY),))) as server:
        assert server.http.post("/admin/drain").status_code == 401
        assert server.http.post("/admin/drain", headers=bearer(KEY)).status_code == 403


METRICS_KEY = "the-metrics-key"


def test_a_metrics_key_opens_the_metrics_and_nothing_else(generator: ScriptedGenerator) -> None:
    settings = msgspec.structs.replace(SETTINGS, metrics_key=(digest(METRICS_KEY),))
    with scripted(generator, settings) as server:
        for key, status in ((METRICS_KEY, 200), (KEY, 200), (ADMIN_KEY, 401), ("wrong", 401)):
            assert server.http.get("/metrics", headers=bearer(key)).status_code == status
        assert server.http.get("/metrics").status_code == 401
        for path in ("/v1/models", "/docs", "/metrics/", "/v1/router"):
            assert server.http.get(path, headers=bearer(METRICS_KEY)).status_code == 401
        assert server.http.post("/admin/drain", headers=bearer(METRICS_KEY)).status_code == 401


def test_a_metrics_key_closes_the_metrics_of_an_open_server(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(metrics_key=(digest(METRICS_KEY),))) as server:
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/metrics", headers=bearer(METRICS_KEY)).status_code == 200
        assert server.http.get("/v1/models").status_code == 200


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


def test_a_browser_may_show_the_key_as_a_password_for_pages_alone(locked: Served) -> None:
    assert locked.http.get("/docs").headers["WWW-Authenticate"] == "Basic"
    assert locked.http.get("/docs", headers=basic(KEY)).status_code == 200
    assert locked.http.get("/docs", headers=basic("wrong")).status_code == 401
    assert locked.http.get("/v1/models", headers=basic(KEY)).status_code == 401
    assert locked.http.post("/admin/drain", headers=basic(ADMIN_KEY)).status_code == 401


@pytest.mark.parametrize("value", ["", "Bearer", "bearer\t" + KEY, f"Token {KEY}", KEY, "Basic !!"])
def test_invalid_credentials(locked: Served, value: str) -> None:
    assert locked.http.get("/docs", headers={"Authorization": value}).status_code == 401


def test_keys_that_are_not_text(locked: Served) -> None:
    headers = [(b"Authorization", b"Bearer \xff\xfe")]
    request = httpx.Request("GET", f"{locked.url}/v1/models", headers=headers)
    assert locked.http.send(request).status_code == 401


def test_keys_are_not_in_the_logs(generator: ScriptedGenerator) -> None:
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(TextFormatter())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    access = logging.getLogger("streamserve.access")
    access_level = access.level
    access.setLevel(logging.INFO)
    try:
        with scripted(generator, SETTINGS) as server:
            server.http.get(f"/v1/models?api_key={KEY}", headers=bearer(KEY))
            server.http.get("/v1/models", headers=bearer("nearly-" + KEY))
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        access.setLevel(access_level)
    lines = output.getvalue().splitlines()
    server_lines = [line for line in lines if not any(client in line for client in ("httpx", "httpcore"))]
    assert any("GET /v1/models 200" in line for line in server_lines)
    assert any("GET /v1/models 401" in line for line in server_lines)
    assert not any(KEY in line for line in server_lines)


def test_the_number_of_open_requests_per_key_is_limited(generator: ScriptedGenerator) -> None:
    """The limit of open requests applies to each key, excludes health checks, and counts only open
    requests."""
    release = threading.Event()

    async def blocking_script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        await asyncio.to_thread(release.wait)
        yield ChoiceDelta(0, "x", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    blocking = generator.replaced(script=blocking_script, submitted=[])
    settings = ApiSettings(api_key=SETTINGS.api_key, max_requests_per_key=2)
    with scripted(blocking, settings) as server:

        def post(key: str) -> httpx.Response:
            return httpx.post(
                f"{server.url}/v1/completions", json={"prompt": "hi"}, headers=bearer(key), timeout=60
            )

        replies: list[int] = []
        threads = [
            threading.Thread(target=lambda key=key: replies.append(post(key).status_code))
            for key in (KEY, KEY, OTHER_KEY)
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(blocking.submitted) == 3)
        error = post(KEY)
        assert (error.status_code, error.headers["Retry-After"]) == (429, "1")
        assert "max_requests_per_key" in error.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health", headers=bearer(KEY)).status_code == 200
        release.set()
        for thread in threads:
            thread.join()
        assert replies == [200] * 3
        assert post(KEY).status_code == 200
