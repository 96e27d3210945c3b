"""The agents: how each is installed, its configuration, and the names of its tools."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.ledger import REPOSITORY

AGENTS_VARIABLE = "AGENTS"
"""Environment variable with the folder in which `make agents` has installed the agents."""
MODEL = "scripted"
KEY = "sk-scripted"

Arguments = dict[str, Any]
Call = tuple[str, Arguments]


def folder() -> Path:
    """Return the folder of the installed agents."""
    return Path(os.environ.get(AGENTS_VARIABLE) or REPOSITORY / "build" / "agents")


@dataclass(frozen=True)
class Address:
    """What an agent is given: the server's address, and its home folder."""

    url: str
    home: Path


@dataclass(frozen=True)
class Agent:
    """An agent.

    `program` is its file in the folder of agents. `ask` and `resume` are its arguments before a prompt: for a
    new conversation, and to continue the last one. `environment` has variables besides HOME and PATH, and
    `files` has configuration files for its home folder. Both contain only the address, the key and the
    model, and switches of updates and telemetry. `read`, `write`, `edit` and `run` make calls of its tools;
    an agent without tools writes files from the text of replies.
    """

    name: str
    program: str
    ask: Sequence[str]
    resume: Sequence[str]
    environment: Callable[[Address], Mapping[str, str]]
    files: Callable[[Address], Mapping[str, str]] = lambda address: {}
    read: Callable[[Path], Call] | None = None
    write: Callable[[Path, str], Call] | None = None
    edit: Callable[[Path, str, str], Call] | None = None
    run: Callable[[str], Call] | None = None
    limits_replies: bool = True
    """Whether the agent's requests limit their output, so that a reply without an end is cut."""
    defines_status: bool = True
    """Whether the agent ends with status 0 if and only if it has answered the prompt."""
    context: int = 110_000
    """Context length in tokens that the first request fits in, but a conversation with long results does
    not."""

    @property
    def path(self) -> Path:
        return folder() / self.program

    def version(self) -> str:
        """Return the version that the agent prints; an empty string if it is not installed."""
        if not self.path.exists():
            return ""
        done = subprocess.run(
            [self.path, "--version"],
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.search(r"\d+\.\d+\.\d+\S*", done.stdout)
        return found[0] if found else ""


def _qwen(address: Address) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{address.url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}


def _opencode(address: Address) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{address.url}/v1", "apiKey": KEY},
        "models": {MODEL: {}},
    }
    config = {"model": f"streamserve/{MODEL}", "provider": {"streamserve": provider}}
    return {".config/opencode/opencode.json": json.dumps(config)}


def _codex(address: Address) -> dict[str, str]:
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "streamserve"',
        "[model_providers.streamserve]",
        'name = "streamserve"',
        f'base_url = "{address.url}/v1"',
        'env_key = "STREAMSERVE_KEY"',
        'wire_api = "responses"',
    ]
    return {".codex/config.toml": "\n".join(lines) + "\n"}


def _claude(address: Address) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": address.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _aider(address: Address) -> dict[str, str]:
    return {
        "OPENAI_API_BASE": f"{address.url}/v1",
        "OPENAI_API_KEY": KEY,
        "AIDER_MODEL": f"openai/{MODEL}",
        "AIDER_CHECK_UPDATE": "false",
        "AIDER_ANALYTICS": "false",
    }


_CODEX_RUN = "exec_command"

AGENTS = (
    Agent(
        "qwen-code",
        "node_modules/.bin/qwen",
        ("--yolo",),
        ("--yolo", "--continue"),
        _qwen,
        read=lambda path: ("read_file", {"file_path": str(path)}),
        write=lambda path, text: ("write_file", {"file_path": str(path), "content": text}),
        edit=lambda path, old, new: (
            "edit",
            {"file_path": str(path), "old_string": old, "new_string": new},
        ),
        run=lambda command: ("run_shell_command", {"command": command, "is_background": False}),
    ),
    Agent(
        "opencode",
        "node_modules/.bin/opencode",
        ("run",),
        ("run", "--continue"),
        lambda address: {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files=_opencode,
        read=lambda path: ("read", {"filePath": str(path)}),
        write=lambda path, text: ("write", {"filePath": str(path), "content": text}),
        edit=lambda path, old, new: (
            "edit",
            {"filePath": str(path), "oldString": old, "newString": new},
        ),
        run=lambda command: ("bash", {"command": command, "description": "Runs a command"}),
        context=70_000,
    ),
    Agent(
        "claude-code",
        "node_modules/.bin/claude",
        ("--allowedTools=Read,Write,Edit,Bash", "--print"),
        ("--allowedTools=Read,Write,Edit,Bash", "--continue", "--print"),
        _claude,
        read=lambda path: ("Read", {"file_path": str(path)}),
        write=lambda path, text: ("Write", {"file_path": str(path), "content": text}),
        edit=lambda path, old, new: (
            "Edit",
            {"file_path": str(path), "old_string": old, "new_string": new},
        ),
        run=lambda command: ("Bash", {"command": command, "description": "Runs a command"}),
        context=160_000,
    ),
    Agent(
        "codex",
        "node_modules/.bin/codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "resume", "--last"),
        lambda address: {"STREAMSERVE_KEY": KEY},
        files=_codex,
        read=lambda path: (_CODEX_RUN, {"cmd": f"cat {path}"}),
        write=lambda path, text: (_CODEX_RUN, {"cmd": f"cat > {path} <<'END'\n{text}END"}),
        edit=lambda path, old, new: (_CODEX_RUN, {"cmd": f"sed -i 's/{old}/{new}/' {path}"}),
        run=lambda command: (_CODEX_RUN, {"cmd": command}),
        limits_replies=False,
        context=80_000,
    ),
    Agent(
        "aider",
        "aider/bin/aider",
        ("--yes-always", "--no-git", "--message"),
        ("--yes-always", "--no-git", "--restore-chat-history", "--message"),
        _aider,
        limits_replies=False,
        defines_status=False,
        context=8_000,
    ),
)
