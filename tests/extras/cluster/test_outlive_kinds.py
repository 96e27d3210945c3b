"""Each kind of request continues with the next head: adapters, a draft model, choices, formats, tools."""

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.extras.cluster.outliving import machine, make_target, metric, until
from tests.serving import Served

PROMPT = [7 + n % 200 for n in range(40)]
TEXT: dict[str, Any] = {
    "prompt": PROMPT, "max_tokens": 150, "temperature": 1.0, "seed": 3, "ignore_eos": True,
}  # fmt: skip
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150, "seed": 3}
AT = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 200}}, "required": ["at"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": AT}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("completions", TEXT),
    "an adapter": ("completions", TEXT | {"model": "first"}),
    "another adapter": ("completions", TEXT | {"model": "second"}),
    "two choices": ("completions", TEXT | {"n": 2, "logprobs": 2}),
    "a format": ("completions", TEXT | {"guided_regex": "([a-f]{3} ){200}"}),
    "penalties": ("completions", TEXT | {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_p": 0.01}),
    "a chat": ("chat/completions", CHAT | {"ignore_eos": True, "logprobs": True, "top_logprobs": 1}),
    "a tool": ("chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("outlive"))


def whole(served: Served, kind: str, key: str = "") -> dict[str, Any]:
    """Return the answer without the fields that differ between two replies."""
    route, body = KINDS[kind]
    headers = {"Idempotency-Key": key} if key else {}
    reply = httpx.post(f"{served.url}/v1/{route}", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            call.pop("id")
    counts = answer["usage"]
    return {"choices": answer["choices"], "counts": (counts["prompt_tokens"], counts["completion_tokens"])}


class Reader:
    """Reads a stream until the head ends it."""

    def __init__(self, served: Served, kind: str) -> None:
        self.chunks = 0
        self._served, self._kind = served, kind
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        route, body = KINDS[self._kind]
        url, headers = f"{self._served.url}/v1/{route}", {"Idempotency-Key": self._kind}
        try:
            with httpx.stream(
                "POST", url, json=body | {"stream": True}, headers=headers, timeout=120
            ) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        self.chunks += bool(json.loads(line[6:])["choices"])
        except httpx.HTTPError:
            pass


@pytest.mark.parametrize("topology", [("--workers", "1"), ("--pairs", "1")], ids=["one worker", "a pair"])
def test_requests_of_each_kind_go_on_with_the_next_head(
    checkpoint: Path,
    tmp_path: Path,
    topology: tuple[str, ...],
    scale: Scale,
) -> None:
    if not scale.full and "--pairs" not in topology:
        pytest.skip("with --full; tests/extras/cluster/test_outlive.py has workers without a pair")
    draft = make_checkpoint(
        tmp_path / "draft", vocab_size=320, max_position_embeddings=1024, num_hidden_layers=1, seed=1
    )
    folders = [write_adapter(tmp_path / name, checkpoint, seed=n) for n, name in enumerate(("x", "y"))]
    arguments = (
        *topology, "--draft", str(draft), "--speculation-policy", "fixed:2", "--max-loras", "2",
        "--lora", f"first={folders[0]}", "--lora", f"second={folders[1]}",
    )  # fmt: skip
    with machine(checkpoint, tmp_path) as joined:
        with joined.head(*arguments) as first:
            expected = {kind: whole(first, kind) for kind in KINDS}
            assert len({str(answer["choices"]) for answer in expected.values()}) == len(KINDS)
            pids = joined.workers()
            readers = [Reader(first, kind) for kind in KINDS]
            until(lambda: all(reader.chunks > 5 for reader in readers))
            first.process.kill()
            for reader in readers:
                reader.thread.join(30)
        with joined.head(*arguments) as second:
            assert joined.workers() == pids
            until(lambda: metric(second, "workers_adopted_total") == len(pids))
            for kind, answer in expected.items():
                assert whole(second, kind, key=kind) == answer, kind
            assert metric(second, "resumed_outputs_total") == len(KINDS)
            assert {kind: whole(second, kind) for kind in KINDS} == expected, (
                "the whole prompt is in the prefix cache"
            )
