"""A table of all result files, and what each file says about how it was made."""

from benchmarks.figures import files
from benchmarks.figures.lookup import call

from .base import TABLES, markdown


def _stamps(up: str) -> str:
    rows = []
    for name in files.names():
        document = files.load(name)
        link = f"[{files.path(name).name}]({up}{files.path(name).relative_to(files.ROOT).as_posix()})"
        rows.append(
            [
                link,
                files.processor(document),
                files.precision(document),
                files.model(document),
                ", ".join(files.commits(document)),
                document.get("date", files.UNKNOWN),
                files.settings(document).replace("|", "/"),
            ]
        )
    return markdown(["file", "machine", "precision", "model", "commits", "date", "settings"], rows)


TABLES["stamps"] = _stamps


@call("verified")
def _verified() -> str:
    """Return commit, machine and date of the last complete run of `make verify`."""
    document = files.load("verify")
    if document["commit"] == files.UNKNOWN:
        return f"its parts ran at {len(document['commits'])} commits, of which none passed all"
    return f"commit {document['commit'][:12]} on {files.processor(document)}, {document['date']}"
