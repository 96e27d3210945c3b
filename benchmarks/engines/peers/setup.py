"""Set up each peer's Python environment, and the checkpoints in each peer's format."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.engines.peers.adapters import OURS, PEERS, Peer

TORCH = "torch==2.13.0"
REPOSITORY = Path(__file__).parents[3]


def python(peer: Peer, folder: Path) -> Path:
    """Return the interpreter that runs the peer: this one, or the interpreter of the peer's environment in
    `folder`."""
    if peer.module == PEERS[OURS].module:
        return Path(sys.executable)
    return folder / "environments" / peer.module / "bin" / "python"


def variables(peer: Peer, cores: Sequence[int]) -> dict[str, str]:
    """Return the environment variables of the peer's processes: the repository is importable, and no
    streamserve settings are passed on."""
    cached = {name: value for name, value in os.environ.items() if not name.startswith("STREAMSERVE_")}
    paths = {"PYTHONPATH": str(REPOSITORY), "PYTHON_OF_STREAMSERVE": sys.executable}
    return {**cached, **paths, **peer.adapter.environment(cores)}


def install(peer: Peer, folder: Path, cores: Sequence[int]) -> None:
    """Create the peer's environment unless it is complete. Raises CalledProcessError with pip's output."""
    interpreter = python(peer, folder)
    home = interpreter.parents[1]
    if not peer.adapter.PACKAGES or (home / "complete").exists():
        return
    pip = [str(interpreter), "-m", "pip"]
    commands = [
        [sys.executable, "-m", "venv", str(home)],
        [*pip, "install", "--quiet", TORCH],
        [*pip, "install", "--quiet", TORCH, *peer.adapter.PACKAGES],
    ]
    if peer.adapter.UNWANTED:
        commands.append([*pip, "uninstall", "--quiet", "--yes", *peer.adapter.UNWANTED])
    for command in commands:
        subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, env=variables(peer, cores))
    (home / "complete").touch()


def converted(peer: Peer, checkpoint: Path, folder: Path, cores: Sequence[int]) -> Path:
    """Return the checkpoint in the peer's format, written unless it exists."""
    if peer.weights not in peer.adapter.CONVERTS:
        return checkpoint
    suffix = f"-{peer.weights.replace(':', '-')}" if peer.weights else ""
    to = folder / "converted" / f"{checkpoint.name}-{peer.module}{suffix}"
    if not to.exists():
        part = to.with_name(to.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.parent.mkdir(parents=True, exist_ok=True)
        arguments = [peer.path, str(checkpoint), str(part), peer.weights]
        command = [str(python(peer, folder)), "-m", __name__, *arguments]
        subprocess.run(
            command, check=True, stderr=subprocess.PIPE, text=True, env=variables(peer, cores), cwd=folder
        )
        part.rename(to)
    return to


def install_all(names: Iterable[str], folder: Path, cores: Sequence[int]) -> dict[str, str]:
    """Install all peers, continuing after errors; return the errors by name."""
    failed = {}
    for name in names:
        print(f"{PEERS[name].title} …", flush=True)
        try:
            install(PEERS[name], folder, cores)
        except subprocess.CalledProcessError as error:
            failed[name] = "\n".join((error.stderr or str(error)).strip().splitlines()[-12:])
    return failed


if __name__ == "__main__":  # runs under a peer's interpreter: convert(checkpoint, to, weights)
    importlib.import_module(sys.argv[1]).convert(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
