"""All result files, and what each says about how it was made."""

from benchmarks.figures import files

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
