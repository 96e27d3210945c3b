"""The examples and the code in the docs run, and the packaged model answers as the guides show."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import Served, serving

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DOCUMENTS = EXAMPLES / "documents"
CURL = r"\$ curl (?:-s )?(?:-X (\w+) )?localhost:8000(/\S+) (?:-H '[^']+' )?(?:\\\n +)?-d '(.*?)'"
"""A command of a guide: method, path, body."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving("embedded", "--threads", "1") as running:
        yield running


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_offline() -> None:
    assert run("offline.py").count("tokens, ") == 3


def test_seeded() -> None:
    assert "equal:         True" in run("seeded.py")


def test_openai_client(served: Served) -> None:
    assert "tokens)" in run("openai_client.py", served.url)


def test_folder_stream(served: Served) -> None:
    *found, answer, times = run("folder_stream.py", str(EXAMPLES / "documents"), served.url).splitlines()
    assert [line.partition(":")[0] for line in found] == sorted(path.name for path in DOCUMENTS.iterdir())
    assert all(re.search(r": \d+ of \d+ earlier tokens are computed$", line) for line in found)
    assert answer == "Anna Keller opened a new library in Lindow on Monday. It cost 14 thousand dollars."
    assert re.fullmatch(r"time to the first token: \d+ ms; sent at the end: \d+ ms", times)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/design/simulation.md", "docs/guides/structured-output.md"]
)
def test_code_in_the_docs_runs(page: str) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip()


def guide(name: str) -> str:
    return (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8")


def sent(served: Served, method: str, path: str, body: Any) -> Any:
    reply = httpx.request(method, served.url + path, json=body, timeout=60)
    assert reply.is_success, reply.text
    return reply.json()


def answer(served: Served, *messages: Any, **fields: Any) -> Any:
    """Return the message that the packaged model answers to these messages."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 64, **fields}
    return sent(served, "POST", "/v1/chat/completions", body)["choices"][0]["message"]


def test_constrained_answers(served: Served) -> None:
    rows = re.findall(r'^\| `("guided_.*)` \| (.+?) \| (.+?) \|$', guide("structured-output"), re.MULTILINE)
    assert len(rows) == 3
    for fields, question, shown in rows:
        message = {"role": "user", "content": question}
        assert answer(served, message, **json.loads(f"{{{fields}}}"))["content"] == shown


def test_a_call_and_the_answer_to_its_result(served: Served) -> None:
    page = guide("tools")
    question, result, shown = map(
        json.loads, re.findall(r'^\{"role": ".*"content": "[^"].*\}$', page, re.MULTILINE)
    )
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    named = {"get_weather": "Get the weather of a city.", "get_time": "Get the time in a city."}
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
        for name, text in named.items()
    ]
    call = answer(served, question, tools=tools)
    (function,) = (each["function"] for each in call["tool_calls"])
    assert f'"name": {json.dumps(function["name"])}, "arguments": {json.dumps(function["arguments"])}' in page
    result["tool_call_id"] = call["tool_calls"][0]["id"]
    assert answer(served, question, call, result, tools=tools)["content"] == shown["content"]


def test_tokens(served: Served) -> None:
    lines = re.findall(r"^ +(POST) (/\w*tokenize) +(\{.*\}) → (\{.*\})$", guide("api"), re.MULTILINE)
    assert len(lines) == 3
    for method, path, body, shown in lines:
        expected = json.loads(shown)
        reply = sent(served, method, path, json.loads(body))
        assert {name: reply[name] for name in expected} == expected


@pytest.mark.parametrize(("name", "count"), [("prompt-streams", 3), ("quickstart", 1)])
def test_commands_of_curl(served: Served, name: str, count: int) -> None:
    page = guide(name)
    commands = re.findall(CURL, page, re.DOTALL)
    assert len(commands) == count
    id, replies = "", []
    for method, path, body in commands:
        reply = sent(served, method or "POST", path.replace("stream-9f…", id), json.loads(body))
        id = id or reply["id"]
        replies.append(reply)
    message = replies[-1]["choices"][0]["message"]
    assert f'"content":{json.dumps(message["content"])}' in page


def test_every_page_with_code_is_run() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(str(page.relative_to(ROOT)) in here for page in pages if "```python" in page.read_text())


def test_every_example_is_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{example.name}"' in here for example in EXAMPLES.glob("*.py"))
