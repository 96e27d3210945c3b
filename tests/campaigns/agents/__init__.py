"""The family `agents`: coding agents as their registries install them, against a real server whose model
writes a script. Each agent gets only the address, the key and the model's name, in a clean environment and an
empty home folder.

    make agents                                   installs the agents in build/agents
    python -m tests.campaigns agents --only-seed 3

Environment variables: AGENTS is the folder of the agents, AGENT_SECONDS the time limit of a prompt, and
AGENT_BODY a file to which the body of a refused request is written.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.campaigns.agents.conversation import check_exchanges, check_result, converse, metric
from tests.campaigns.agents.installed import AGENTS, AGENTS_VARIABLE, KEY, MODEL, Address, Agent
from tests.campaigns.agents.relay import open_relay
from tests.campaigns.agents.scenarios import OTHERS, Task, tasks
from tests.campaigns.outcome import UNAVAILABLE, Outcome, TrialFailure
from tests.campaigns.real_server import RealServer
from tests.scripted_checkpoint import make_scripted

START_SECONDS = 300.0
FLAGS = ("--threads", "1", "--kv-cache-bytes", "300MB", "--served-model-name", MODEL, "--api-key", KEY)


class AgentsCampaign:
    """Trials by agent and scenario: consecutive seeds run all agents with one scenario, then with the next.
    Each such round has a new checkpoint, whose vocabulary cuts replies into other pieces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tasks = tasks(AGENTS, folder / "work")
        self._versions: dict[str, str] = {}
        self._server: RealServer | None = None
        self._serves: tuple[int, int | None] | None = None

    def trial(self, seed: int) -> Outcome:
        """Run the task of a seed with its agent, to the end."""
        turn, number = divmod(seed, len(self._tasks))
        (name, scenario), task = list(self._tasks.items())[number]
        (agent,) = (agent for agent in AGENTS if agent.name == name)
        if not agent.path.exists():
            detail = f"{name} is not installed: run `make agents`, or set {AGENTS_VARIABLE} to its folder"
            return Outcome(verdict="refused", kind=UNAVAILABLE, detail=detail)
        self._versions[name] = self._versions.get(name) or agent.version()
        settings = {"agent": name, "version": self._versions[name], "scenario": scenario}
        try:
            server = self._serve(turn, task.context)
            counts = self._attempt(server, agent, task)
        except TrialFailure as failure:
            self.close()
            return Outcome(verdict="failed", kind=failure.kind, detail=failure.detail, settings=settings)
        return Outcome(verdict="passed", counts=counts, settings=settings)

    def figures(self) -> dict[str, Any]:
        return {"versions": self._versions}

    def close(self) -> None:
        if self._server is not None:
            self._server.end()
        self._server = self._serves = None

    def _attempt(self, server: RealServer, agent: Agent, task: Task) -> dict[str, int]:
        work = self._folder / "work" / task.name
        work.mkdir(parents=True, exist_ok=True)
        for name, text in task.files.items():
            (work / name).write_text(text)
        with (
            tempfile.TemporaryDirectory(prefix="home-", dir=self._folder) as home,
            open_relay(server.port) as link,
        ):
            address = Address(link.url, Path(home))
            for name, text in agent.files(address).items():
                (address.home / name).parent.mkdir(parents=True, exist_ok=True)
                (address.home / name).write_text(text)
            before = metric(server, "prompt_tokens_total")
            output = converse(agent, task, address, work, link, server)
            counts = check_exchanges(task, link, output)
            counts["prompt tokens"] = int(metric(server, "prompt_tokens_total") - before)
            check_result(task, work, output, compacted=counts["compacted"] > 0)
        server.check()
        return {f"{agent.name} {self._versions[agent.name]} tasks": 1, **counts}

    def _serve(self, turn: int, context: int | None) -> RealServer:
        if self._serves != (turn, context) or self._server is None:
            self.close()
            model = self._folder / f"model-{turn}"
            replies = [reply for task in self._tasks.values() for reply in task.replies]
            make_scripted(model, [*replies, OTHERS], turn)
            limit = () if context is None else ("--max-model-len", str(context))
            self._server = RealServer(str(model), *FLAGS, *limit)
            self._server.start(START_SECONDS)
            self._serves = (turn, context)
        return self._server


@contextmanager
def open_campaign() -> Iterator[AgentsCampaign]:
    """Set the family up; a server starts with the first trial."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        campaign = AgentsCampaign(Path(folder).resolve())
        try:
            yield campaign
        finally:
            campaign.close()
