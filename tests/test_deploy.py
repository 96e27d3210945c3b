"""The files in deploy/: the commands exist, names that refer to each other agree, and the manifests have the
form that Kubernetes requires. No container engine and no cluster runs here."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from streamserve.api.metrics.worker_metrics import WorkerMetrics
from streamserve.cli.main import app
from streamserve.protocol.curve import parse_endpoint
from streamserve.settings.cluster import resolve_join
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from tests.api.reports import REPORT
from tests.deploying import DEPLOY, KUBERNETES, KUBERNETES_VERSION, ROOT, documents, named, options
from tests.extras.cluster.fakes import key_file

COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def pods() -> list[dict[str, Any]]:
    return [d for d in documents() if d["kind"] in ("Deployment", "StatefulSet")]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the arguments of `streamserve` in all files."""
    for name, service in COMPOSE["services"].items():
        yield f"compose {name}", service["command"]
    for pod in pods():
        (container,) = pod["spec"]["template"]["spec"]["containers"]
        yield f"kubernetes {container['name']}", container["args"]
    for unit in UNITS:
        (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        yield unit.name, shlex.split(line.partition("=")[2])[1:]


@pytest.mark.parametrize(
    ("where", "arguments"), list(commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_commands_are_accepted(where: str, arguments: list[str], tmp_path: Path) -> None:
    """Commands are accepted: their flags exist, and the values can be combined. Test keys replace the mounted
    ones."""
    parsed = typer.main.get_command(app)
    command = parsed.commands[arguments[0]]  # type: ignore[attr-defined]
    command.make_context(arguments[0], list(arguments[1:]))
    given = options(arguments[1:])
    key, keys = key_file(tmp_path), tmp_path / "keys"
    keys.write_text("a-key\n")
    if arguments[0] == "worker":
        settings = resolve_join(
            given["join"],
            str(key),
            None,
            given.get("address"),
            int(given.get("workers", 1)),
            given.get("model"),
        )
        assert settings.head.port == 7800
        return
    files = {"join-key": str(key), "api-key-file": str(keys), "admin-key-file": str(keys)}
    environ = {f"STREAMSERVE_{n.upper().replace('-', '_')}": files.get(n, v) for n, v in given.items()}
    server = resolve("embedded", environ=environ).server
    assert parse_endpoint(server.listen).port == 7800
    assert server.launcher == "join"
    assert server.api_key, "no client is served without a key"
    assert server.admin_key
    with pytest.raises(SettingsError, match="join_key"):
        resolve("embedded", environ={name: v for name, v in environ.items() if "JOIN_KEY" not in name})


def test_manifests_have_the_form_of_their_kinds() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    checked = [validator.validate(document, KUBERNETES_VERSION, strict=True) for document in documents()]
    assert len(checked) >= 10
    broken = named("PodDisruptionBudget", "streamserve-worker")
    with pytest.raises(validator.ValidationError):
        validator.validate({**broken, "spec": {"maxUnavailabel": 1}}, KUBERNETES_VERSION, strict=True)


def test_all_manifests_are_applied() -> None:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    there = {file.name for file in KUBERNETES.glob("*.yaml")}
    assert there - set(listed) == {"kustomization.yaml", "secret.yaml", "prometheus-adapter.yaml"}
    assert set(listed) <= there


def test_pods_have_what_they_mount_and_the_labels_that_select_them() -> None:
    secret = named("Secret", "streamserve-keys")
    claims = {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}
    for pod in pods():
        template, spec = pod["spec"]["template"], pod["spec"]["template"]["spec"]
        assert pod["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        (container,) = spec["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
        for volume in spec["volumes"]:
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
            assert volume.get("secret", {}).get("secretName") in (None, "streamserve-keys")
            assert {item["key"] for item in volume.get("secret", {}).get("items", ())} <= set(
                secret["stringData"]
            )
        for value in options(container["args"][1:]).values():
            if value.startswith("/keys/"):
                assert value.removeprefix("/keys/") in secret["stringData"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        ports = {port["name"] for port in container.get("ports", ())}
        for probe in ("livenessProbe", "readinessProbe"):
            assert container.get(probe, {}).get("httpGet", {}).get("port") in {None, *ports}
    assert "REPLACE" in secret["stringData"]["cluster.key"], "no key is in the repository"


def test_the_names_of_services_workers_and_metrics_agree() -> None:
    head, workers = named("Deployment", "streamserve-head"), named("StatefulSet", "streamserve-worker")
    spec = head["spec"]["template"]["spec"]
    flags, of_worker = (
        options(pod["spec"]["template"]["spec"]["containers"][0]["args"][1:]) for pod in (head, workers)
    )
    joined = parse_endpoint(of_worker["join"])
    service = named("Service", joined.host)
    assert [port["port"] for port in service["spec"]["ports"]] == [joined.port]
    assert service["spec"]["publishNotReadyAddresses"], "the head is ready when a worker is"
    assert service["spec"]["selector"] == head["spec"]["selector"]["matchLabels"]
    assert named("Service", workers["spec"]["serviceName"])
    assert spec["terminationGracePeriodSeconds"] > float(flags["drain-timeout"])
    scaler = named("HorizontalPodAutoscaler", "streamserve-worker")["spec"]
    assert scaler["scaleTargetRef"]["name"] == workers["metadata"]["name"]
    assert scaler["maxReplicas"] == int(flags["workers"])
    budget = named("PodDisruptionBudget", "streamserve-worker")["spec"]
    assert budget["selector"] == workers["spec"]["selector"]
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    assert scaler["metrics"][0]["external"]["metric"]["name"] == rule["name"]["as"]
    exported = {metric.name for metric in WorkerMetrics("m", lambda: REPORT).collect()}
    used = {
        word.split("{")[0]
        for word in rule["metricsQuery"].replace("(", " ").split()
        if "streamserve:" in word
    }
    assert used == {"streamserve:num_requests_running", "streamserve:num_requests_waiting"}
    assert used <= exported


def test_a_worker_is_ready_when_it_is_connected_to_the_head() -> None:
    """A worker is ready when it is connected to the head. The probe's command runs with a free port in place
    of 7800."""
    (container,) = named("StatefulSet", "streamserve-worker")["spec"]["template"]["spec"]["containers"]
    _, flag, code = container["readinessProbe"]["exec"]["command"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ":1E78" in code
        probe = [sys.executable, flag, code.replace(":1E78", f":{port:04X}")]
        assert subprocess.run(probe, check=False).returncode == 1
        with socket.create_connection(("127.0.0.1", port)):
            assert subprocess.run(probe, check=False).returncode == 0


def test_the_compose_file_names_what_it_defines() -> None:
    assert set(COMPOSE) <= {"name", "services", "networks", "volumes", "secrets", "x-streamserve"}
    for name, service in COMPOSE["services"].items():
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"]), name
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        assert set(service.get("depends_on", ())) <= set(COMPOSE["services"])
        flags = options(service["command"][1:])
        mounted = {
            value.removeprefix("/run/secrets/") for value in flags.values() if "/run/secrets/" in value
        }
        assert mounted == set(service["secrets"])
        assert service["cap_drop"] == ["ALL"]
    join = parse_endpoint(options(COMPOSE["services"]["worker"]["command"][1:])["join"])
    assert join.host in COMPOSE["services"]
    (port,) = COMPOSE["services"]["head"]["ports"]
    assert port.startswith("127.0.0.1:"), "other machines reach it only if it is configured"
    assert set(COMPOSE["secrets"]) == {"cluster.key", "api-keys", "admin-keys"}


def test_systemd_leaves_the_workers_to_the_server() -> None:
    guide = (ROOT / "docs" / "operations" / "running.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```ini\n(.*?)```", guide, re.DOTALL)
    for unit in (example, *(unit.read_text(encoding="utf-8") for unit in UNITS)):
        assert {"KillMode=mixed", "OOMPolicy=continue"} <= set(unit.splitlines())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_units(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    command = "/opt/streamserve/bin/streamserve"
    assert command in text

    def verify(content: str) -> tuple[int, str]:
        (tmp_path / unit.name).write_text(content.replace(command, shutil.which("true") or "/bin/true"))
        analyzed = [
            "systemd-analyze",
            "verify",
            "--man=no",
            "--recursive-errors=no",
            str(tmp_path / unit.name),
        ]
        done = subprocess.run(analyzed, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    code, message = verify(text)
    assert (code, unit.name in message) == (0, False), message
    code, message = verify(text.replace("RestartSec=", "RestartSecs="))
    assert "RestartSecs" in message, "systemd reports settings that it does not know"
