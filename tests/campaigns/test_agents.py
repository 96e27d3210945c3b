"""The family `agents`, tested without agents: tasks, the environment, the relay, and the conditions of an
outcome."""

import json
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.text.tools.formats import FORMATS
from tests.campaigns.agents import AgentsCampaign
from tests.campaigns.agents.conversation import (
    check_exchanges,
    check_result,
    check_status,
    environment,
)
from tests.campaigns.agents.installed import AGENTS, AGENTS_VARIABLE, Address, Agent
from tests.campaigns.agents.relay import Connection, Relay, Request, open_relay, requests
from tests.campaigns.agents.scenarios import OTHERS, SCENARIOS, Task, tasks
from tests.campaigns.outcome import ERROR, UNAVAILABLE, UNCLEAR, UNEXPECTED_5XX, WRONG_TEXT, TrialFailure
from tests.scripted_checkpoint import make_scripted

TASK = Task("t", ["do it"], [], "the-result", written={"out": "5\n"}, tools=1)
BODY = b'{"messages": [{"role":"tool","content":"x"}]}'


def exchanged(*statuses: int, body: bytes = BODY, path: str = "/v1/messages") -> Relay:
    """Return a relay that has exchanged requests with these bodies and statuses."""
    connection = Connection()
    for status in statuses:
        connection.sent += (
            b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body
        )
        connection.received += b"HTTP/1.1 %d OK\r\n\r\nsorry" % status
    return Relay(0, [connection])


def test_every_agent_has_a_task_in_every_scenario_that_its_tools_permit(tmp_path: Path) -> None:
    made = tasks(AGENTS, tmp_path)
    with_tools = {agent.name for agent in AGENTS if agent.run is not None}
    assert with_tools == {"qwen-code", "opencode", "claude-code", "codex"}
    assert {key for key in made if key[0] in with_tools} == {
        (name, scenario) for name in with_tools for scenario in SCENARIOS
    }
    assert {scenario for name, scenario in made if name == "aider"} == {
        "read",
        "write",
        "interrupt",
        "cut",
        "ten-turns",
    }
    cues = [reply.cue for task in made.values() for reply in task.replies]
    assert not [(a, b) for a in cues for b in cues if a is not b and a in b], "no cue is part of another"


def test_all_tasks_fit_in_one_checkpoint(tmp_path: Path) -> None:
    replies = [reply for task in tasks(AGENTS, tmp_path).values() for reply in task.replies]
    for seed in range(3):
        folder = make_scripted(tmp_path / str(seed), [*replies, OTHERS], seed)
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        assert max(vocabulary.values()) < size, "a row for each token"
        assert len(set(vocabulary.values())) == len(vocabulary), "no piece stands for two tokens"


def test_the_calls_that_are_nearly_right_are_wrong(tmp_path: Path) -> None:
    (mark,) = FORMATS["hermes"].closings
    task = tasks(AGENTS, tmp_path)["qwen-code", "nearly-right"]
    *calls, last = (reply.text for reply in task.replies)
    assert mark not in last
    assert [text.count(mark) for text in calls] == [0, 1, 0, 2]
    assert [text.count("{") - text.count("}") for text in calls] == [0, 1, 1, 0]


def test_a_conversation_of_ten_turns_uses_every_tool_and_ends_in_a_cut_and_an_overflow(
    tmp_path: Path,
) -> None:
    for agent in AGENTS:
        name = f"{agent.name}-ten-turns"
        task = tasks([agent], tmp_path)[agent.name, "ten-turns"]
        assert len(task.prompts) == 10
        by_cue = {reply.cue: reply.text for reply in task.replies}
        assert len(by_cue) == len(task.replies), "each step has one reply"
        ends = [reply for reply in task.replies if "<tool_call>" not in reply.text]
        assert [reply.endless for reply in ends] == [*[False] * 7, True, False, False]
        assert task.printed in ends[-1].text
        assert task.printed not in "".join(reply.text for reply in task.replies[:-1])
        assert all(text in end.text for text, end in zip(task.before, ends, strict=False))
        for prompt, end in zip(task.prompts, ends, strict=True):
            (step,) = (cue for cue in by_cue if cue in prompt)
            while "<tool_call>" in by_cue[step]:  # each call leads to the next step
                (step,) = (cue for cue in by_cue if cue in by_cue[step] and cue != step)
            assert by_cue[step] == end.text
        if agent.run and agent.read and agent.write and agent.edit:
            text = "".join(by_cue.values())
            tools = {
                made[0]
                for made in (
                    agent.read(tmp_path),
                    agent.write(tmp_path, ""),
                    agent.edit(tmp_path, "", ""),
                    agent.run(""),
                )
            }
            assert all(f'"name": "{tool}"' in text for tool in tools)
            assert task.tools == 15
            assert text.count(f"cat {tmp_path / name}/long") == 6


STATUS = replace(TASK, refusable=True, says=["too long"])
AGENT, NO_STATUS = AGENTS[0], AGENTS[-1]


@pytest.mark.parametrize(
    ("agent", "task", "status", "interrupted", "printed", "passes"),
    [
        (AGENT, TASK, 0, False, "", True),
        (AGENT, TASK, 1, False, "", False),
        (AGENT, TASK, 1, False, "too long", False),
        (AGENT, STATUS, 1, False, "prompt is TOO LONG", True),
        (AGENT, STATUS, 1, False, "error", False),
        (AGENT, TASK, 1, True, "", True),
        (AGENT, TASK, -2, True, "", True),
        (AGENT, TASK, 130, True, "", True),
        (AGENT, TASK, -11, True, "", False),
        (AGENT, STATUS, -11, False, "too long", False),
        (AGENT, TASK, -2, False, "", False),
        (NO_STATUS, TASK, 1, False, "", True),
        (NO_STATUS, TASK, -6, False, "", False),
    ],
)
def test_a_failed_end_of_an_agent_fails_the_trial(
    agent: Agent, task: Task, status: int, interrupted: bool, printed: str, passes: bool
) -> None:
    if passes:
        check_status(agent, task, status, interrupted, printed)
        return
    with pytest.raises(TrialFailure, match=f"ended with status {status}"):
        check_status(agent, task, status, interrupted, printed)


def test_an_agent_gets_nothing_but_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-server")
    for agent in AGENTS:
        given = environment(agent, Address("http://127.0.0.1:9", tmp_path))
        assert given["HOME"] == str(tmp_path)
        assert "of-another-server" not in given.values()
        texts = [*given.values(), *agent.files(Address("http://127.0.0.1:9", tmp_path)).values()]
        assert any("http://127.0.0.1:9" in text for text in texts), agent.name
        assert any("sk-scripted" in text for text in texts), agent.name


def test_agents_that_are_not_installed_are_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(AGENTS_VARIABLE, str(tmp_path))
    outcome = AgentsCampaign(tmp_path).trial(0)
    assert (outcome.verdict, outcome.kind) == ("refused", UNAVAILABLE)
    assert "qwen-code is not installed" in outcome.detail
    assert "make agents" in outcome.detail


def test_the_version_is_what_the_program_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENTS_VARIABLE, str(tmp_path))
    agent = replace(AGENTS[0], program="agent")
    assert agent.version() == ""
    program = tmp_path / "agent"
    program.write_text(f"#!{sys.executable}\nprint('agent 1.22.3-beta (x)')\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert agent.version() == "1.22.3-beta"


def test_requests_are_read_from_the_bytes_of_a_connection() -> None:
    plain = b"POST /a HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc"
    chunked = b"POST /b HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1;x=y\r\nf\r\n0\r\n\r\n"
    read = list(requests(plain + chunked + b"GET /c HTTP/1.1\r\n\r\n" + plain[:-1]))
    assert read == [
        Request("POST /a", b"abc"),
        Request("POST /b", b"def"),
        Request("GET /c", b""),
        Request("POST /a", b"ab"),
    ]


@pytest.fixture
def echoing() -> Iterator[int]:
    """The port of a server that replies with the bytes it received, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + client.recv(1000))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(10)


def test_a_relay_forwards_and_keeps_what_was_said(echoing: int) -> None:
    sent = b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"
    with open_relay(echoing) as link, socket.create_connection(("127.0.0.1", link.port), 10) as client:
        client.sendall(sent)
        reply = b""
        while piece := client.recv(1000):
            reply += piece
    assert reply == b"HTTP/1.1 200 OK\r\n\r\n" + sent
    assert link.exchanges() == [(Request("POST /x", b"hi"), 200)]


def test_a_server_sees_that_the_client_of_a_relay_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, open_relay(listener.getsockname()[1]) as link:
        client = socket.create_connection(("127.0.0.1", link.port), 10)
        server, _ = listener.accept()
        with server:
            server.settimeout(10)
            client.close()
            assert server.recv(1) == b"", "a client may read on after half-closing"
            with pytest.raises(OSError, match=r"Broken pipe|reset"):
                server.sendall(b"x" * 50_000_000)


def test_counts_of_a_task_that_is_done() -> None:
    counts = {"requests": 2, "tool results": 1, "compacted": 0}
    assert check_exchanges(TASK, exchanged(200, 200), "") == counts
    overflowing = replace(TASK, refusable=True)
    link = exchanged(200, 400)
    link.connections += exchanged(200, body=BODY[:-1]).connections
    assert check_exchanges(overflowing, link, "")["compacted"] == 1
    assert check_exchanges(overflowing, exchanged(200, 400), "")["refused as expected"] == 1


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        (exchanged(200, 500), UNEXPECTED_5XX),
        (exchanged(200, 400), UNCLEAR),
        (exchanged(200, body=b"{}"), ERROR),
        (exchanged(), ERROR),
    ],
)
def test_refusals_errors_and_tasks_without_tools_fail(link: Relay, kind: str) -> None:
    with pytest.raises(TrialFailure) as failure:
        check_exchanges(TASK, link, "")
    assert failure.value.kind == kind
    if kind == UNCLEAR:
        assert '"role":"tool"' in failure.value.detail
        assert "sorry" in failure.value.detail


def test_the_result_is_what_was_printed_and_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("5\n")
    check_result(TASK, tmp_path, "here is the-result")
    check_result(replace(TASK, says=["too long"]), tmp_path, "Error: prompt is TOO LONG")
    check_result(replace(TASK, says=["too long"]), tmp_path, "nothing", compacted=True)
    earlier = replace(TASK, says=["too long"], before=["one", "two"])
    check_result(earlier, tmp_path, "one two too long")
    with pytest.raises(TrialFailure, match="'two'"):
        check_result(earlier, tmp_path, "one too long")
    with pytest.raises(TrialFailure, match=WRONG_TEXT):
        check_result(TASK, tmp_path, "nothing", compacted=True)
    os.remove(tmp_path / "out")
    with pytest.raises(TrialFailure, match="out has None"):
        check_result(TASK, tmp_path, "the-result")
