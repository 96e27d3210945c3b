"""`benchmarks/README.md` has every benchmark once, with its result files and the page that shows them."""

import re
from pathlib import Path

from tests.benchmarks.smoke import runs
from tests.docs.pages import ROOT

FOLDER = ROOT / "benchmarks"
INTERNAL = {
    "benchmarks.engines.peers.child": "started by benchmarks.engines.peers",
    "benchmarks.engines.peers.setup": "started by benchmarks.engines.peers",
    "benchmarks.engines.peers.reading": "started by benchmarks.engines.peers.quality",
    "benchmarks.papers.star_target": "started by benchmarks.papers.star",
    "benchmarks.papers.wire": "started by benchmarks.papers.star_hosts",
    "benchmarks.figures": "renders pages",
}
"""Programs in the folder that are not benchmarks."""
NOT_MEASURED = "not measured"
MODULE = re.compile(r"(?<![\w./])benchmarks(?:\.[a-z]\w*)+\b(?!\.json|/)")
LINK = re.compile(r"\[[^]]*\]\(([^)#]+)[^)]*\)")


def module(script: Path) -> str:
    return ".".join(script.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def benchmarks() -> set[str]:
    """Return the modules that can be run as programs."""
    scripts = (file for file in FOLDER.rglob("*.py") if 'if __name__ == "__main__"' in file.read_text())
    return {module(script) for script in scripts} - INTERNAL.keys()


def rows() -> list[list[str]]:
    """Return the cells of the index: question, script, result files, page, minutes."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


def test_every_benchmark_is_in_the_index_once() -> None:
    named = [row[1].strip("`") for row in rows()]
    assert sorted(named) == sorted(benchmarks())


def test_every_file_and_page_of_the_index_exists() -> None:
    for question, script, files, page, minutes in rows():
        assert question, script
        assert minutes, script
        for cell in (files, page):
            linked = LINK.findall(cell)
            assert linked or cell in (NOT_MEASURED, "none"), f"{script}: {cell}"
            missing = [name for name in linked if not (FOLDER / name).exists()]
            assert not missing, f"{script}: {missing}"


def test_every_result_file_is_in_the_index_once() -> None:
    linked = [Path(name).name for row in rows() for name in LINK.findall(row[2])]
    results = [file.name for file in (FOLDER / "results").glob("*.json")]
    data = [file.name for file in (FOLDER / "data").iterdir()]
    assert sorted(linked) == sorted(results + data)


def test_every_benchmark_has_a_smoke_run_or_says_what_it_needs() -> None:
    assert runs.named_benchmarks() == benchmarks()


def test_benchmarks_that_pages_and_scripts_name_exist() -> None:
    pages = {*ROOT.glob("*.md"), ROOT / "Makefile", *(ROOT / "docs").rglob("*.md"), *FOLDER.rglob("*.py")}
    # excluded: it quotes result files by the names that they had at the time
    pages -= {ROOT / "docs" / "results" / "files.md"}
    named = {name for page in pages for name in MODULE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 40
    files = {module(file).removesuffix(".__init__") for file in FOLDER.rglob("*.py")} - {"benchmarks"}
    missing = {name for name in named if name not in files and name.rpartition(".")[0] not in files}
    assert not missing
