"""Requests have ids, in replies and in logs."""

import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator

import pytest

from streamserve.api.generator import Item
from streamserve.protocol.sampling import SamplingParams
from streamserve.system.logs import ACCESS, JsonFormatter
from streamserve.text.output import ChoiceDelta
from tests.api.serving import ScriptedGenerator, Served, scripted, until

PREFIX = re.compile(r"req-[0-9a-f]{24}")


class Lines(logging.Handler):
    """A log handler that stores formatted lines. They are formatted when logged, in the context of their
    request."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def logged() -> Iterator[list[dict[str, object]]]:
    """Collect what the server logs during the block, access logs included."""
    handler, root, access = Lines(), logging.getLogger(), logging.getLogger(ACCESS)
    level = access.level
    root.addHandler(handler)
    access.setLevel(logging.INFO)
    yield handler.lines
    root.removeHandler(handler)
    access.setLevel(level)


def test_a_clients_id_comes_back(hello: Served) -> None:
    for route, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/completions", {"prompt": "hi", "n": 0})):
        reply = hello.http.post(route, json=body, headers={"X-Request-Id": "trace.1:a_b-C"})
        assert reply.headers["X-Request-Id"] == "trace.1:a_b-C"


@pytest.mark.parametrize("given", ["", "x" * 129, "-first", "two words", "a\tb", "a/b", 'a"b', "<script>"])
def test_ids_that_could_do_harm_are_replaced(hello: Served, given: str) -> None:
    reply = hello.http.get("/ping", headers={"X-Request-Id": given})
    assert PREFIX.fullmatch(reply.headers["X-Request-Id"])


def test_every_reply_has_one_of_its_own(hello: Served) -> None:
    stream = hello.post("/v1/completions", prompt="hi", stream=True)
    replies = [stream, hello.http.get("/ping"), hello.http.get("/nothing"), hello.post("/v1/completions")]
    ids = [reply.headers["X-Request-Id"] for reply in replies]
    assert all(PREFIX.fullmatch(name) for name in ids)
    assert len(set(ids)) == len(ids)


def test_access_is_logged_with_the_id_and_without_the_query(
    hello: Served, logged: list[dict[str, object]]
) -> None:
    hello.http.get("/v1/models/none%0Aforged?secret=1", headers={"X-Request-Id": "trace-1"})

    def lines() -> list[dict[str, object]]:  # log lines of earlier requests may still arrive
        return [line for line in logged if (line["logger"], line.get("request_id")) == (ACCESS, "trace-1")]

    until(lambda: bool(lines()))
    (line,) = lines()
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models/none%0Aforged", 404)
    assert line["client"] == "127.0.0.1"
    assert "secret" not in json.dumps(line)


def test_failures_are_logged_with_the_id(
    generator: ScriptedGenerator, logged: list[dict[str, object]]
) -> None:
    async def broken(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        raise ValueError("a fault")
        yield ChoiceDelta(0)

    with scripted(generator.replaced(script=broken)) as server:
        for number, stream in enumerate((True, False)):
            headers = {"X-Request-Id": f"trace-{number}"}
            body = {"prompt": "hi", "stream": stream}
            reply = server.http.post("/v1/completions", json=body, headers=headers)
            assert (reply.status_code, reply.headers["X-Request-Id"]) == (500, f"trace-{number}")
    failures = [line for line in logged if "a fault" in str(line.get("error"))]
    assert {line["request_id"] for line in failures} == {"trace-0", "trace-1"}
