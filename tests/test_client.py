"""With the sync and the async client, a streamed prompt gets the answer of a prompt sent at once. The client
is a distribution without the server."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from email.parser import Parser
from functools import partial
from pathlib import Path

import httpx
import pytest

import streamserve.client
import streamserve_client
from scripts.build_wheel import pack
from streamserve import __version__
from streamserve_client import AsyncPromptStream, PromptStream, StreamError, Withdrawn
from tests.serving import Served, serving

ROOT = Path(__file__).parents[1]
SAMPLING = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
FIELDS = {"query": "\nWhat is 12 + 7?", **SAMPLING}


@pytest.fixture(scope="module")
def server():
    with serving(
        "embedded", "--threads", "1", "--draft", "none", "--api-key", "a-key-of-some-length"
    ) as served:
        yield served


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's wheel, built from a copy without the server's code."""
    copy = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "client", copy / "client", ignore=shutil.ignore_patterns("build"))
    for name in (
        "src/streamserve_client/__init__.py",
        "src/streamserve_client/py.typed",
        "src/streamserve/__init__.py",
    ):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", copy]
    subprocess.run([*build, copy / "client"], check=True, capture_output=True)
    return next(copy.glob("*.whl"))


def test_the_wheel_has_the_client_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        described = Parser().parsestr(
            archive.read(f"{'-'.join(wheel.stem.split('-')[:2])}.dist-info/METADATA").decode()
        )
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"streamserve_client"}
    assert "streamserve_client/__init__.py" in names
    assert (described["Name"], described["Version"]) == ("streamserve-client", __version__)
    assert described.get_all("Requires-Dist") == ["httpx>=0.27"]


def test_make_wheel_packs_it_for_any_machine_and_always_alike(wheel: Path, tmp_path: Path) -> None:
    first, second = (pack(wheel, {}, tmp_path / name) for name in ("first", "second"))
    assert first.name == wheel.name == f"streamserve_client-{__version__}-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive, zipfile.ZipFile(wheel) as built:
        assert sorted(archive.namelist()) == sorted(built.namelist())
        (described,) = (name for name in archive.namelist() if name.endswith("/WHEEL"))
        assert {"Root-Is-Purelib: true", "Tag: py3-none-any"} <= set(
            archive.read(described).decode().splitlines()
        )


def test_the_wheel_is_used_without_the_server(wheel: Path) -> None:
    code = "import sys; sys.modules['streamserve'] = None\n"
    code += "import streamserve_client as client; print(client.__file__, client.PromptStream.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(wheel / "streamserve_client" / "__init__.py"), "PromptStream"], (
        done.stderr
    )


@pytest.mark.parametrize("absent", ["streamserve_client", "httpx"])
def test_without_its_distribution_the_import_says_what_to_install(absent: str) -> None:
    code = f"import sys; sys.modules['{absent}'] = None; import streamserve.client"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: streamserve.client needs streamserve-client: "
        "pip install its wheel, or ./client of the repository"
    )


def test_a_server_has_the_same_client() -> None:
    assert streamserve.client.__all__ == streamserve_client.__all__
    for name in streamserve_client.__all__:
        assert getattr(streamserve.client, name) is getattr(streamserve_client, name)


def complete_text(server: Served, prompt: str) -> str:
    headers = {"Authorization": "Bearer a-key-of-some-length"}
    body = {"prompt": prompt, **SAMPLING}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    return str(reply.json()["choices"][0]["text"])


def test_the_example_of_the_guide(server: Served) -> None:
    """The example in docs/guides/prompt-streams.md works as it is printed there."""
    guide = (ROOT / "docs" / "guides" / "prompt-streams.md").read_text(encoding="utf-8")
    code = guide.partition("    from streamserve_client import PromptStream\n")[2].partition("\n\nWith")[0]
    code = textwrap.dedent(code).replace(
        '"http://127.0.0.1:8000"', f'"{server.url}", api_key="a-key-of-some-length"'
    )
    run = [sys.executable, "-c", f"from streamserve_client import PromptStream\n{code}"]
    answer = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert answer.endswith("13")
    assert json.dumps(answer)[1:-1] in guide


def test_all_edits(server: Served) -> None:
    with PromptStream(server.url + "/v1", api_key="a-key-of-some-length", **FIELDS) as stream:
        first = stream.append("Tom has 8 apples.")
        last = stream.append(" He sings.")
        stream.insert(" Anna has 9.", before=last)
        stream.replace(first, "Tom has 3 pears.")
        stream.remove(2)
        assert stream.version == 5
        assert stream.state()["version"] == 5
        text = stream.finish()["choices"][0]["text"]
    assert text == complete_text(server, "Tom has 3 pears. Anna has 9." + FIELDS["query"])


def test_an_answer_in_pieces(server: Served) -> None:
    with PromptStream(server.url, api_key="a-key-of-some-length", **FIELDS) as stream:
        stream.append("Read this.")
        pieces = list(stream.answer())
    assert len(pieces) > 1
    assert "".join(pieces) == complete_text(server, "Read this." + FIELDS["query"])


async def test_in_an_event_loop(server: Served) -> None:
    async with AsyncPromptStream(server.url, api_key="a-key-of-some-length", **FIELDS) as stream:
        first = await stream.append("One.")
        await stream.insert("Zero. ", before=0)
        await stream.replace(first, "Two.")
        await stream.append(" Three.")
        await stream.remove(2)
        assert (await stream.state())["version"] == 5
        pieces = [piece async for piece in stream.answer()]
    assert "".join(pieces) == complete_text(server, "Zero. Two." + FIELDS["query"])
    async with AsyncPromptStream(server.url, api_key="a-key-of-some-length", **FIELDS) as stream:
        await stream.append("Zero. Two.")
        assert (await stream.finish())["choices"][0]["text"] == "".join(pieces)


def test_refusals(server: Served) -> None:
    with pytest.raises(StreamError, match="key is required") as caught:
        PromptStream(server.url)
    assert caught.value.status == 401
    with PromptStream(server.url, api_key="a-key-of-some-length") as stream:
        stream.append("a")
        stream.version = 7
        with pytest.raises(StreamError) as caught:
            stream.append("b")
        assert (caught.value.status, caught.value.version) == (409, 1)


def replying(monkeypatch: pytest.MonkeyPatch, reply: Callable[[httpx.Request], httpx.Response]) -> None:
    """Let `reply` answer the requests of clients."""
    for kind in (httpx.Client, httpx.AsyncClient):
        make = partial(kind, transport=httpx.MockTransport(reply))
        monkeypatch.setattr(httpx, kind.__name__, make)


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (502, '{"error": "bad gateway"}', '{"error": "bad gateway"}'),
        (403, '["no"]', '["no"]'),
        (404, '{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (200, "<html>", "<html>"),
        (429, '{"error": {"message": "too many"}}', "too many"),
    ],
)
async def test_a_reply_of_a_proxy_is_shown(
    monkeypatch: pytest.MonkeyPatch, status: int, text: str, message: str
) -> None:
    replying(monkeypatch, lambda request: httpx.Response(status, text=text))
    with pytest.raises(StreamError) as caught:
        PromptStream("http://server")
    assert (caught.value.status, str(caught.value)) == (status, message)
    with pytest.raises(StreamError) as caught:
        await AsyncPromptStream("http://server").open()
    assert (caught.value.status, str(caught.value)) == (status, message)


async def test_an_error_of_the_program_is_not_hidden_by_a_server_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    methods = []

    def reply(request: httpx.Request) -> httpx.Response:
        methods.append(request.method)
        if request.method == "DELETE":
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"id": "a", "version": 0})

    replying(monkeypatch, reply)
    stream = PromptStream("http://server")
    with pytest.raises(KeyError), stream:
        raise KeyError
    other = AsyncPromptStream("http://server")
    with pytest.raises(KeyError):
        async with other:
            raise KeyError
    assert methods == ["POST", "DELETE"] * 2
    assert stream._http.is_closed
    assert other._http.is_closed


def test_a_request_whose_reply_is_lost_is_sent_again(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose reply is lost is sent again, and its edit is applied only once."""
    with PromptStream(server.url, api_key="a-key-of-some-length", **FIELDS) as stream:
        send, lost = stream._http.request, []

        def unreliable(*arguments, **keywords):
            reply = send(*arguments, **keywords)
            if not lost:
                lost.append(reply)
                raise httpx.ReadError("lost")
            return reply

        monkeypatch.setattr(stream._http, "request", unreliable)
        assert stream.append("a") == "chunk-1"
        assert lost
        assert (stream.version, stream.state()["version"]) == (1, 1)


def test_an_early_answer_and_its_withdrawal(server: Served) -> None:
    """An early answer is withdrawn by an edit: text read before it is void, and text after it answers the
    final prompt."""
    with PromptStream(server.url, api_key="a-key-of-some-length", answer_early=True, **FIELDS) as stream:
        stream.append("Zero.")
        pieces = stream.early()
        text = str(next(pieces))
        stream.append(" One.")
        final = False
        for piece in pieces:
            text = "" if isinstance(piece, Withdrawn) else text + piece
            if not final:
                final = stream.finish()["version"] == 2
    assert text == complete_text(server, "Zero. One." + FIELDS["query"])


async def test_an_early_answer_in_an_event_loop(server: Served) -> None:
    key = "a-key-of-some-length"
    async with AsyncPromptStream(server.url, api_key=key, answer_early=True, **FIELDS) as stream:
        await stream.append("Zero.")
        text, versions = "", []
        async for piece in stream.early():
            if isinstance(piece, Withdrawn):
                versions.append(piece.version)
                text = ""
                await stream.finish()
                continue
            text += piece
            if not versions and stream.version == 1:
                await stream.append(" One.")
    assert versions == [2]
    assert text == complete_text(server, "Zero. One." + FIELDS["query"])
