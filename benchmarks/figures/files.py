"""Read result files and say how they were made."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "benchmarks" / "results", ROOT / "tests" / "results")
UNKNOWN = "unknown"

Document = dict[str, Any]


def path(name: str) -> Path:
    """Return the result file of this name, without its suffix.

    Raises:
        KeyError: there is no such result file.
    """
    for folder in FOLDERS:
        if (found := folder / f"{name}.json").is_file():
            return found
    raise KeyError(f"no result file {name}.json")


def names() -> list[str]:
    """Return the names of all result files except the campaigns'."""
    return sorted(file.stem for folder in FOLDERS for file in folder.glob("*.json"))


@cache
def load(name: str) -> Document:
    """Return the content of the result file `name`."""
    document: Document = json.loads(path(name).read_bytes())
    return verification(document) if "parts" in document else document


def verification(document: Document) -> Document:
    """Return the results of `make verify` as if one run had made them: with the results of all its parts."""
    parts = document["parts"].values()
    return document | {
        "figures": {test: record for part in parts for test, record in part.get("figures", {}).items()},
        "machine": {"processor": document["machine"]},
    }


def figures(name: str) -> Any:
    """Return the measured results in the file."""
    return load(name)["figures"]


def processor(document: Document) -> str:
    """Return processor and cores in a few words, or `unknown`."""
    machine = document.get("machine", {})
    named = re.sub(r"\((?:R|TM)\)|\bProcessor\b", "", machine.get("processor", UNKNOWN))
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    return " ".join(named.split()).replace(" @", " at") + cores


def precision(document: Document) -> str:
    """Return the precision of weights and KV that the file states, or `unknown`."""
    if models := document.get("models"):
        return "; ".join(f"{name}: {stamped['precision']}" for name, stamped in models.items())
    settings = document.get("settings", {})
    said = document.get("precision", settings.get("precision", settings.get("dtype", UNKNOWN)))
    if isinstance(said, dict):
        return "; ".join(f"{engine}: {precision}" for engine, precision in said.items())
    return str(said)


def model(document: Document) -> str:
    """Return the model's name and fingerprint as far as the file has them."""
    if "models" in document:
        shown = [
            f"{name}, fingerprint {stamped['fingerprint']}" for name, stamped in document["models"].items()
        ]
        return "; ".join(shown) or "none"
    settings = document.get("settings", {})
    said = document.get("model", settings.get("model", UNKNOWN))
    fingerprint = document.get("fingerprint", document.get("model_fingerprint", UNKNOWN))
    if isinstance(said, dict):
        said, fingerprint = said.get("name", UNKNOWN), said.get("fingerprint", fingerprint)
    if isinstance(said, list):
        said = ", ".join(map(str, said))
    return f"{said}, fingerprint {fingerprint}" if said != UNKNOWN or fingerprint != UNKNOWN else UNKNOWN


def settings(document: Document) -> str:
    """Return the settings of a run in one line. Lists and long values are shown only by their length."""
    found = document.get("settings")
    if found is None:
        return UNKNOWN
    shown = []
    for key, value in found.items():
        if value in (None, "None", "", [], {}) or key in ("precision", "notes", "versions", "name"):
            continue
        if isinstance(value, list) and len(value) > 8:
            value = f"{len(value)} values"
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        elif isinstance(value, dict):
            value = f"{len(value)} values"
        elif isinstance(value, float):
            value = f"{value:.4g}"
        shown.append(f"{key} {value}")
    return "; ".join(shown) or UNKNOWN


def commits(document: Document) -> list[str]:
    """Return the commits of all parts of the file, the file's own commit first."""
    found = [commit[:13] for commit in (document.get("commit", UNKNOWN), *document.get("commits", []))]

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "commit" and isinstance(inner, str):
                    found.append(inner[:13])
                elif key == "commits":
                    found.extend(one[:13] for one in inner)
                else:
                    collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    collect(document.get("figures"))
    return list(dict.fromkeys(found))


def mixture(document: Document, name: str = "") -> str | None:
    """Say which runs a file mixes, as far as the file shows it; None if a single run wrote it."""
    several = commits(document)
    if len(several) > 1:
        return f"the file mixes runs of the commits {', '.join(several)}"
    scenarios = document["figures"].get("scenarios", {}) if isinstance(document.get("figures"), dict) else {}
    rounds = [one["rounds"] for engines in scenarios.values() for one in engines.values()]
    if len(set(rounds)) > 1:
        return f"rounds of each value: {min(rounds)} to {max(rounds)}"
    parts = document.get("settings", {}).get("parts")
    if isinstance(parts, list) and parts and set(parts) != set(document["figures"]):
        return (
            f"the file mixes runs: the stamp describes the last run, which measured {', '.join(parts)}; "
            "the other parts have none"
        )
    return MIXED.get(name)


MIXED = {
    "peers_speculation_with_plain": "the file contains the round of peers_speculation_new_prompts.json too"
}
"""Files that mix several runs without a field that says so. New files have the field."""


def stamp(name: str, up: str, *, brief: bool = False) -> str:
    """Return the line under a table: file, machine, precision, model, commit, date, and what is mixed.

    Args:
        name: the result file's name, without suffix.
        up: the path from the page to the repository's root ("../../").
        brief: leave precision and model to the text around the table.
    """
    document = load(name)
    link = f"[{path(name).name}]({up}{path(name).relative_to(ROOT).as_posix()})"
    parts = [processor(document)]
    if not brief:
        parts += [f"precision {precision(document)}", f"model {model(document)}"]
    parts += [f"commit {commits(document)[0]}", f"date {document.get('date', UNKNOWN)}"]
    if mixed := mixture(document, name):
        parts.append(mixed)
    return f"{link}: " + "; ".join(parts)
