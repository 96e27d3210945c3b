"""Each of the inputs that once froze the server or filled its memory is refused quickly, by an error that
names the field, and its memory is released. (benchmarks/robustness/hostile.py measures the delay of other
requests.)"""

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from streamserve.api.generator import Item
from streamserve.api.http.json_scan import MAX_CONTAINERS
from streamserve.api.settings import ApiSettings
from streamserve.protocol.messages import LikelyToken, PromptLogprob, PromptLogprobs
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.prompt_chunks import MAX_CHUNKS, MAX_OPERATIONS, ChunkOperation, ContextVersion
from tests.api.serving import ScriptedGenerator, Served, scripted, until

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MB = 1 << 20
MESSAGE = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": [' + "{}," * 100_000 + "{}]}"}}


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (CHATS, b'{"messages": [' + b"{}," * (2 * MB) + b"{}]}", "65536 lists and objects"),
        (COMPLETIONS, b'{"prompt": [' + b"1," * MB + b"1]}", "524288 values"),
        # One message exceeds two limits; which limit is noticed first depends on the chunks that arrive.
        (CHATS, {"messages": [MESSAGE] * 150_000}, "which is the limit"),
        (CHATS, {"messages": [MESSAGE] * 65}, "at least 65 tokens > 64 maximum"),
        (CHATS, {"messages": [MESSAGE], "tools": [TOOL] * 120_000}, "65536 lists and objects"),
        (CHATS, {"messages": [MESSAGE], "tools": [TOOL] * 1000}, "there are two tools called"),
        (CHATS, {"messages": [MESSAGE, {"role": "assistant", "tool_calls": [CALL]}]}, "lists and objects"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_grammar": 'root ::= "' + "a" * MB},
            "at most 65536 bytes",
        ),
        (COMPLETIONS, {"prompt": "a", "guided_grammar": "# a\n" * 130_000}, "at most 65536 bytes"),
        (COMPLETIONS, {"prompt": "a", "guided_grammar": "a ::= b\n" * 501}, "501 rules and groups"),
        (COMPLETIONS, {"prompt": "a", "guided_regex": "a" * MB}, "at most 65536 bytes are allowed"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_choice": ["a" * 1000] * 1000},
            "at most 65536 bytes are allowed",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_json": '{"items":' * 100_000},
            "at most 65536 bytes are allowed",
        ),
        (COMPLETIONS, {"prompt": "a", "guided_json": '{"items":' * 5_000}, "guided_json is not JSON"),
        (
            COMPLETIONS,
            {"prompt": "a", "guided_json": {"anyOf": [{}] * 60_000}},
            "at most 65536 bytes are allowed",
        ),
        (COMPLETIONS, {"prompt": [[5] * 60] * 320, "prompt_logprobs": 64}, "1048576 is the limit"),
        (COMPLETIONS, {"prompt": "a" * (7 * MB)}, "over 262144 characters"),
    ],
)
def test_what_is_too_much_is_refused_by_name(hello: Served, route: str, body: Any, message: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    start = time.process_time()  # of the server too, which is a thread
    reply = hello.http.post(route, content=content)
    assert time.process_time() - start < 10  # some took minutes in earlier versions
    assert reply.status_code == 400, reply.text[:200]
    assert message in reply.json()["error"]["message"]
    until(lambda: hello.metric("memory_held_bytes") == 0)


@pytest.mark.parametrize(
    "grammar",
    [
        "# a\n" * 16_000 + 'root ::= "a"',
        "\n" * 65_000 + 'root ::= "a"',
        " " * 65_000 + 'root ::= "a"',
        'root ::= "a" #' + " #" * 32_000,
    ],
)
def test_grammars_at_the_limit_are_converted_in_one_pass(hello: Served, grammar: str) -> None:
    """Blank lines and comments take linear time. It was once quadratic: 26 s for eight times the accepted
    size."""
    start = time.process_time()  # of the server too, which is a thread
    reply = hello.post(COMPLETIONS, prompt="a", guided_grammar=grammar)
    assert reply.status_code == 200, reply.text
    assert time.process_time() - start < 5


def test_many_named_edits_are_found_quickly() -> None:
    """1,024 operations find chunks by name among 16,384 chunks, although each insertion moves the others."""
    context = ContextVersion()
    for _ in range(MAX_CHUNKS // MAX_OPERATIONS):
        context, _ = context.edited([ChunkOperation(op="append", text="")] * MAX_OPERATIONS)
    names = [f"chunk-{MAX_CHUNKS - number}" for number in range(MAX_OPERATIONS)]
    operations = [ChunkOperation(op="replace", chunk=name, text="é") for name in names]
    start = time.process_time()
    changed, touched = context.edited(operations)
    assert time.process_time() - start < 2
    assert touched == names
    assert [chunk.text for chunk in changed.chunks] == [""] * (MAX_CHUNKS - 1024) + ["é"] * 1024


def test_legal_requests_at_the_limits_are_served(generator: ScriptedGenerator) -> None:
    """Requests at the limits are served: a chat with one message for each token of the context, a prompt that
    fills the context, and many tools."""
    wide = generator.replaced(
        model=msgspec.structs.replace(generator.model, max_model_len=8192),
        tokenizer=generator.tokenizer,
        submitted=[],
    )
    with scripted(wide) as server:
        assert server.post(COMPLETIONS, prompt=[5] * 8191, max_tokens=1).status_code == 200
        assert server.post(COMPLETIONS, prompt=[[5] * 4096] * 64, max_tokens=1).status_code == 200
        text = "word " * 1600
        assert server.post(COMPLETIONS, prompt=[text] * 100, max_tokens=1).status_code == 200
        assert len(wide.submitted) == 165
        until(lambda: server.metric("memory_held_bytes") == 0)


def test_prompt_scores_of_a_full_context_are_served_and_charged(generator: ScriptedGenerator) -> None:
    """Log-probabilities of a full context are delivered whole, while other requests are answered."""
    length, release = 2000, threading.Event()
    top = [LikelyToken(token, -0.5 * token) for token in range(64)]

    async def scores(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for start in range(1, len(prompt), 100):
            positions = range(start, min(start + 100, len(prompt)))
            yield PromptLogprobs("r", 0, start, [PromptLogprob(7, -3.5, 8, top) for _ in positions])
        await asyncio.to_thread(release.wait)
        yield ChoiceDelta(0, "x", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    wide = generator.replaced(
        script=scores, model=msgspec.structs.replace(generator.model, max_model_len=4096)
    )
    with scripted(wide, ApiSettings(max_memory_bytes=64 * MB)) as server:
        body = {"prompt": [5] * length, "prompt_logprobs": 64, "max_tokens": 1}
        replies: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: replies.append(server.post(COMPLETIONS, **body).json()))
        asking.start()
        until(lambda: server.metric("memory_held_bytes") > 65 * length * 100)
        more = server.post(COMPLETIONS, **{**body, "prompt": [5] * 3000})
        release.set()
        assert (more.status_code, more.headers.get("Retry-After")) == (429, "1"), more.text[:200]
        asking.join()
        (reply,) = replies
        table = reply["choices"][0]["prompt_logprobs"]
        assert len(table) == length
        assert table[0] is None
        assert len(table[-1]) == 64
        assert table[-1]["7"] == {"logprob": -3.5, "rank": 8, "decoded_token": table[1]["7"]["decoded_token"]}
        until(lambda: server.metric("memory_held_bytes") == 0)


def test_the_limit_of_containers_allows_real_tools() -> None:
    """128 functions with a hundred parameters each are within the limit."""
    parameters = {"properties": {f"p{n}": {"type": "string", "description": "x"} for n in range(100)}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": parameters}} for n in range(128)
    ]
    assert json.dumps(tools).count("{") < MAX_CONTAINERS / 4
