"""Tables and numbers of the pages equal the result files."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.figures import files, lookup
from benchmarks.figures.page import NUMBER, TABLE, PageError, differences, pages, render
from benchmarks.figures.tables import TABLES
from tests.docs.pages import DOCS, ROOT

MARKED = [page for page in pages() if re.search(r"<!-- figures: |<!--=", page.read_text())]
Copy = Callable[[str], Path]


@pytest.fixture
def copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Copy:
    """Return a function that writes a page with this text into a copy of the repository."""
    monkeypatch.setattr("benchmarks.figures.page.ROOT", tmp_path)

    def write(text: str) -> Path:
        page = tmp_path / "page.md"
        page.write_text(text)
        return page

    return write


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_the_values_of_the_result_files(page: Path) -> None:
    assert differences(page) == [], "run `make figures`"


@pytest.mark.parametrize("page", MARKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_change_by_hand_is_found(page: Path, copy: Copy) -> None:
    """If any number or the last digit of a table is changed by hand, the check reports the page."""
    text = page.read_text(encoding="utf-8")
    spans = [match.span(2) for match in NUMBER.finditer(text)]
    spans += [match.span(3) for match in TABLE.finditer(text)]
    assert spans
    for start, end in spans:
        *_, digit = re.finditer(r"\d", text[start:end])
        at = start + digit.start()
        other = str((int(text[at]) + 1) % 10)
        assert differences(copy(text[:at] + other + text[at + 1 :]))


def test_every_table_is_on_a_page() -> None:
    named = {match[2] for page in MARKED for match in TABLE.finditer(page.read_text())}
    assert named == set(TABLES)


def test_guides_have_no_results() -> None:
    assert not [page for page in MARKED if page.is_relative_to(DOCS / "guides")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("it is <!--=speed-->2<!--/--> times\n", "used or defined alone: speed"),
        ("x\n\n<!-- numbers\nspeed = star > N_full_measured\n-->\n", "used or defined alone: speed"),
        ("<!--=a-->2<!--/-->\n\n<!-- numbers\na = star > N_full_measured\n-->\n", "a line may not begin"),
        ("is <!--=a-->2<!--/-->\n\n<!-- numbers\na = star > absent\n-->\n", "there is no 'absent'"),
        ("is <!--=a-->2<!--/-->\n\n<!-- numbers\na = absent > x\n-->\n", "no result file absent.json"),
        ("is <!--=a-->2<!--/-->\n\n<!-- numbers\na = star > N_full_measured as 1.0\n-->\n", "not a format"),
        ("is <!--=a-->2<!--/-->\n\n<!-- numbers\na: 2\n-->\n", "not a definition"),
        ("<!-- figures: absent -->\n<!-- end -->\n", "there is no table absent"),
        ("<!-- figures: stamps -->\n", "is not closed"),
    ],
)
def test_wrong_markers_are_named(copy: Copy, text: str, message: str) -> None:
    with pytest.raises(PageError, match=message):
        render(copy(text))


@pytest.mark.parametrize(
    ("found", "form", "shown"),
    [
        (0.1234, "0 %", "12 %"),
        (0.01234, "0.0 ms", "12.3 ms"),
        (29168, "0,0", "29,168"),
        ([1.26, 0.84], "range 0.0", "0.8–1.3"),
        ({"value": 0.5, "low": 0.4, "high": 0.6}, "interval 0 %", "50 % (40–60)"),
        ({"value": 0.5, "low": 0.4, "high": 0.6}, "0.00", "0.50"),
        ("as it is", "text", "as it is"),
    ],
)
def test_formats(found: object, form: str, shown: str) -> None:
    assert lookup.formatted(found, form) == shown


def test_what_a_file_never_recorded_is_unknown() -> None:
    assert files.precision({}) == files.model({}) == files.settings({}) == files.UNKNOWN
    assert files.commits({}) == [files.UNKNOWN]


def test_what_a_file_recorded_is_shown() -> None:
    assert files.model({"model": {"name": "m", "fingerprint": "12ab"}}) == "m, fingerprint 12ab"
    assert files.precision({"settings": {"precision": {"a": "bf16", "b": "f32"}}}) == "a: bf16; b: f32"
    assert files.settings({"settings": {"seeds": 3, "none": None}}) == "seeds 3"


def test_mixed_runs_are_said() -> None:
    commits = {"commit": "a" * 12, "figures": [{"commits": ["a" * 12, "b" * 12]}]}
    assert files.mixture(commits) == f"the file mixes runs of the commits {'a' * 12}, {'b' * 12}"
    parts = {"settings": {"parts": ["routers"]}, "figures": {"routers": {}, "burst": {}}}
    assert "the last run, which measured routers" in (files.mixture(parts) or "")
    assert files.mixture({"commit": "a", "figures": []}) is None
