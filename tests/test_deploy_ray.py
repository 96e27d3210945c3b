"""deploy/kuberay: the server's command is accepted, names that refer to each other agree, and Kubernetes'
objects have the required form. No cluster and no KubeRay runs here."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from streamserve.cli.main import app
from streamserve.settings.cluster import check_visible_keys
from streamserve.settings.resolve import resolve
from tests.deploying import DEPLOY, KUBERNETES_VERSION, documents, named, options

JOB, SERVICE, POLICY = yaml.safe_load_all((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
CLUSTER = JOB["spec"]["rayClusterSpec"]
HEAD = CLUSTER["headGroupSpec"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
COMMAND = shlex.split(JOB["spec"]["entrypoint"])


def test_the_command_is_accepted_by_a_server_whose_workers_fit_into_the_pods(tmp_path: Path) -> None:
    program, subcommand, *arguments = COMMAND
    assert (program, subcommand) == ("streamserve", "serve")
    command = typer.main.get_command(app).commands[subcommand]  # type: ignore[attr-defined]
    command.make_context(subcommand, list(arguments))
    given = options(arguments)
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    # Ray is not needed here, so the setting that requires it is left out.
    values = {name: str(keys) if name.endswith("key-file") else value for name, value in given.items()}
    assert values.pop("launcher") == "ray"
    environ = {f"STREAMSERVE_{name.upper().replace('-', '_')}": value for name, value in values.items()}
    settings = resolve("embedded", environ=environ)
    assert settings.server.api_key
    assert settings.server.admin_key
    check_visible_keys(settings.server, {name.replace("-", "_") for name in given})
    (container,) = WORKERS["template"]["spec"]["containers"]
    assert settings.model.threads == int(container["resources"]["limits"]["cpu"])
    assert settings.server.workers == WORKERS["replicas"] == WORKERS["minReplicas"]
    assert settings.server.max_workers == WORKERS["maxReplicas"]
    assert HEAD["rayStartParams"]["num-cpus"] == "0", "no worker runs where the server runs"


def test_pods_have_what_they_mount_and_the_labels_that_select_them() -> None:
    keys = named("Secret", "streamserve-keys")["stringData"]
    claims = {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}
    for template in (HEAD["template"], WORKERS["template"]):
        spec = template["spec"]
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
        for volume in spec["volumes"]:
            assert volume.get("persistentVolumeClaim", {}).get("claimName") in {None, *claims}
            assert volume.get("secret", {}).get("secretName") in (None, "streamserve-keys")
        assert POLICY["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert SERVICE["spec"]["selector"] == HEAD["template"]["metadata"]["labels"]
    (container,) = HEAD["template"]["spec"]["containers"]
    assert SERVICE["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    mounted = {value for value in options(COMMAND[2:]).values() if value.startswith("/keys/")}
    assert {value.removeprefix("/keys/") for value in mounted} <= set(keys)
    assert "keys" not in {
        mount["name"] for mount in WORKERS["template"]["spec"]["containers"][0]["volumeMounts"]
    }


def test_objects_have_the_form_of_their_kinds() -> None:
    validator = pytest.importorskip("kubernetes_validate")

    def pod(template: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": "v1", "kind": "Pod", **template}

    for document in (SERVICE, POLICY, pod(HEAD["template"]), pod(WORKERS["template"])):
        validator.validate(document, KUBERNETES_VERSION, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate(pod({"spec": {"containerz": []}}), KUBERNETES_VERSION, strict=True)
