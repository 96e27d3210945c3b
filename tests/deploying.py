"""The manifests in deploy/, as documents."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"

KUBERNETES_VERSION = "1.31"


def documents() -> list[dict[str, Any]]:
    """Return the Kubernetes objects."""
    values = ("kustomization.yaml", "prometheus-adapter.yaml")
    files = [file for file in sorted(KUBERNETES.glob("*.yaml")) if file.name not in values]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents() if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def options(arguments: list[str]) -> dict[str, str]:
    """Return the values of flags, as --name=value or --name value."""
    values: dict[str, str] = {}
    for position, argument in enumerate(arguments):
        if argument.startswith("--"):
            name, separator, value = argument.removeprefix("--").partition("=")
            values[name] = value if separator else arguments[position + 1]
    return values
