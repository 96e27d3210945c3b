"""Run an agent through a task, and check what the agent and the server did."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import httpx
import psutil

from tests.campaigns.agents.installed import KEY, Address, Agent
from tests.campaigns.agents.relay import Relay, Request
from tests.campaigns.agents.scenarios import Task
from tests.campaigns.outcome import (
    ERROR,
    HANG,
    LEFT_BEHIND,
    UNCLEAR,
    UNEXPECTED_5XX,
    WRONG_TEXT,
    TrialFailure,
)
from tests.campaigns.real_server import RealServer

AGENT_SECONDS = float(os.environ.get("AGENT_SECONDS", "600"))
"""Time limit of one prompt."""
STREAMED = 100
"""Number of streamed events after which the agent is interrupted."""
END_SECONDS = 60.0
PATH = "/usr/local/bin:/usr/bin:/bin"


def environment(agent: Agent, address: Address) -> dict[str, str]:
    """Return the complete environment of an agent: it inherits no variable of this process."""
    return {"HOME": str(address.home), "PATH": PATH, "TERM": "dumb", **agent.environment(address)}


def converse(agent: Agent, task: Task, address: Address, work: Path, link: Relay, server: RealServer) -> str:
    """Give an agent all prompts of a task, and return what it printed. Raises TrialFailure if it does not
    end, or if a process or a request is left."""
    output = ""
    for number, prompt in enumerate(task.prompts):
        arguments = [*(agent.resume if number else agent.ask), prompt, *task.arguments]
        with (address.home / f"output-{number}").open("w+") as printed:
            process = subprocess.Popen(
                [agent.path, *arguments],
                cwd=work,
                env=environment(agent, address),
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_interruptible,
            )
            interrupted = task.interrupted and not number
            _wait(process, link, interrupted, printed)
            printed.seek(0)
            text = printed.read()
            check_status(agent, task, process.returncode, interrupted, text)
            output += text
        _nothing_left(address.home, server)
    return output


def _interruptible() -> None:
    """Accept SIGINT: processes that a shell starts in the background inherit that the signal is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait(process: subprocess.Popen[bytes], link: Relay, interrupted: bool, printed: IO[str]) -> None:
    try:
        if interrupted:
            _until(lambda: _streaming(link) or process.poll() is not None, AGENT_SECONDS)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.wait(AGENT_SECONDS)
    except (subprocess.TimeoutExpired, TimeoutError):
        printed.seek(0)
        seen = ", ".join(f"{request.line} {status}" for request, status in link.exchanges())
        raise TrialFailure(HANG, f"no end; requests: {seen}; printed: {printed.read()[-900:]}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_status(agent: Agent, task: Task, status: int, interrupted: bool, printed: str) -> None:
    """Raise TrialFailure if an agent ended with a status that it defines for failures, or by a signal other
    than that of an interruption. It may fail where it says that the context overflows."""
    stopped = interrupted and status in (-signal.SIGINT, 128 + signal.SIGINT)
    overflows = task.refusable and any(word in printed.lower() for word in task.says)
    fails = status > 0 and agent.defines_status and not interrupted and not overflows
    if not stopped and (status < 0 or fails):
        raise TrialFailure(ERROR, f"{agent.name} ended with status {status}; printed: {printed[-900:]}")


def _streaming(link: Relay) -> bool:
    """Return whether the reply without an end is under way: other replies have fewer events."""
    return any(connection.received.count(b"data: ") > STREAMED for connection in link.connections)


def _until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)


def _nothing_left(home: Path, server: RealServer) -> None:
    """Wait until no process with this home folder runs and no request is open. Ends and reports those that
    remain."""
    try:
        _until(lambda: not _processes(home), END_SECONDS)
    except TimeoutError:
        left = _processes(home)
        names = [" ".join(process.cmdline())[:200] for process in left if process.is_running()]
        for process in left:
            process.kill()
        raise TrialFailure(LEFT_BEHIND, f"processes of the agent: {names}") from None
    try:
        _until(lambda: metric(server, "num_requests_running") == 0, END_SECONDS)
    except TimeoutError:
        raise TrialFailure(LEFT_BEHIND, "requests of the agent run after its end") from None


def _processes(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def metric(server: RealServer, name: str) -> float:
    """Return the sum of a server metric over its labels."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=120).text
    lines = [line for line in text.splitlines() if line.startswith(f"streamserve:{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def check_exchanges(task: Task, link: Relay, output: str) -> dict[str, int]:
    """Return counts of requests. Raises TrialFailure if the server failed at a request, or refused one
    unexpectedly."""
    exchanges = link.exchanges()
    counts = {"requests": len(exchanges), "tool results": link.tool_results()}
    for request, status in exchanges:
        if status >= 500:
            raise TrialFailure(UNEXPECTED_5XX, f"{status}: {request.line} {_shown(request.body)}")
        if status >= 400:
            overflows = task.refusable and status == 400
            probes = request.line.startswith(("GET", "HEAD")) and status in (404, 405)
            if not overflows and not probes:
                raise TrialFailure(
                    UNCLEAR, f"{status}: {request.line} {_reply(link, status)} {_shown(request.body)}"
                )
            counts["refused as expected"] = counts.get("refused as expected", 0) + 1
    counts["compacted"] = int(_compacted(exchanges))
    if not any(request.body for request, status in exchanges if status == 200):
        raise TrialFailure(ERROR, f"no request was answered; printed: {output[-900:]}")
    if not any(task.seen in request.body.decode(errors="replace") for request, _ in exchanges):
        raise TrialFailure(ERROR, f"no request has the text {task.seen!r}")
    if counts["tool results"] < task.tools:
        raise TrialFailure(
            ERROR, f"{counts['tool results']} tool results of {task.tools}; printed: {output[-900:]}"
        )
    return counts


def _compacted(exchanges: Sequence[tuple[Request, int]]) -> bool:
    """Return whether a refused request was followed by a shorter one that was answered."""
    refused = 0
    for request, status in exchanges:
        if status == 200 and 0 < len(request.body) < refused:
            return True
        refused = max(refused, len(request.body) if status == 400 else 0)
    return False


def _shown(body: bytes) -> str:
    if "AGENT_BODY" in os.environ:
        Path(os.environ["AGENT_BODY"]).write_bytes(body)
    return body[:200].decode(errors="replace")


def _reply(link: Relay, status: int) -> str:
    received = link.received()
    at = received.find(b"HTTP/1.1 %d" % status)
    return received[at:].partition(b"\r\n\r\n")[2][:400].decode(errors="replace")


def check_result(task: Task, work: Path, output: str, compacted: bool = False) -> None:
    """Raise TrialFailure unless the agent has written what its task expects, and has printed its result or
    the reason why there is none."""
    missing = [text for text in task.before if text not in output]
    if missing:
        raise TrialFailure(WRONG_TEXT, f"{missing} is not in the output: {output[-900:]}")
    ended = any(word in output.lower() for word in task.says) or (compacted and bool(task.says))
    if task.printed not in output and not ended:
        raise TrialFailure(WRONG_TEXT, f"{task.printed} is not in the output: {output[-900:]}")
    for name, text in task.written.items():
        path = work / name
        found = path.read_text() if path.exists() else None
        if found != text:
            raise TrialFailure(WRONG_TEXT, f"{name} has {found!r}, not {text!r}; printed: {output[-500:]}")
