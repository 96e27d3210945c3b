"""Examines this machine as a server would find it, and prints the findings."""

import os
from pathlib import Path

import typer

from streamserve.cli.findings import (
    Finding,
    Verdict,
    address_finding,
    files_finding,
    folder_finding,
    import_finding,
    memory_finding,
    processor_finding,
    sockets_finding,
    version_findings,
)
from streamserve.system.processors import usable_processors
from streamserve.system.user_folders import cache_folder

COLORS = {Verdict.OK: "green", Verdict.SLOW: "yellow", Verdict.FAIL: "red"}


def run(host: str, port: int) -> None:
    """Print the findings, with advice for each. Raises typer.Exit (1) if a server could not start."""
    findings = find(host, port)
    for finding in findings:
        typer.echo(typer.style(f"{finding.verdict:4}", fg=COLORS[finding.verdict]), nl=False)
        typer.echo(f"  {finding.subject:10} {finding.text}")
        if finding.verdict != Verdict.OK:
            typer.echo(f"{'':17}→ {finding.advice}")
    failed = any(finding.verdict == Verdict.FAIL for finding in findings)
    slow = sum(finding.verdict == Verdict.SLOW for finding in findings)
    better = f"; {slow} could be better" if slow else ""
    typer.echo(f"\n{'a server cannot start here' if failed else 'a server can start here'}{better}")
    if failed:
        raise typer.Exit(1)


def find(host: str, port: int) -> list[Finding]:
    """Return all findings about this machine."""
    findings = [*version_findings(), import_finding()]
    if findings[-1].verdict == Verdict.OK:
        findings += _by_torch()
    return [*findings, *_folders(), address_finding(host, port), sockets_finding(), files_finding()]


def _by_torch() -> list[Finding]:
    """Return the findings whose modules import torch."""
    from streamserve.cli.kernel_findings import kernel_findings
    from streamserve.execution.profile.profile import processor_name
    from streamserve.system.available_memory import available_bytes

    usable = usable_processors()
    processor = processor_finding(processor_name(), usable, os.cpu_count() or 1)
    return [processor, *kernel_findings(), memory_finding(available_bytes()), *gpu_findings()]


def gpu_findings() -> list[Finding]:
    """Return the finding about the folder where compiled GPU kernels are cached: whether it can be written,
    and the compile time that the cache saves at later starts. Return no finding without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return []
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache"))
    finding = folder_finding("gpu", folder, "kernels are compiled at every start", "TRITON_CACHE_DIR")
    if finding.verdict != Verdict.OK:
        return [finding]
    started = "the first start compiles kernels, in about 5 s, and stores them in"
    return [Finding(Verdict.OK, "gpu", f"{torch.cuda.get_device_name()}: {started} {folder}")]


def _folders() -> list[Finding]:
    """Return the findings about the folders to which a server writes."""
    cache = cache_folder()
    hub = Path(os.environ.get("HF_HOME") or cache.with_name("huggingface"))
    without = "kernels and profiles are created again at every start"
    return [
        folder_finding("cache", cache, without, "XDG_CACHE_HOME"),
        folder_finding("models", hub, "models cannot be downloaded by name", "HF_HOME"),
    ]
