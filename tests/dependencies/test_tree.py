"""Closures, hashes and distances are correct for a small repository and for this one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dependencies import Tree, read

FILES = {
    "pyproject.toml": "",
    "README.md": "It takes <!--=seconds-->3 s<!--/-->.\n",
    "src/streamserve/__init__.py": "def __getattr__(name):\n    from streamserve.llm import LLM\n",
    "src/streamserve/__main__.py": "def main():\n    import streamserve.serve\n",
    "src/streamserve/llm.py": "from streamserve.engine import step\nLLM = 1\n",
    "src/streamserve/serve.py": "",
    "src/streamserve/engine/__init__.py": "",
    "src/streamserve/engine/step.py": "",
    "src/streamserve/engine/cpp/step.cpp": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "from tests.helper import HELP\n",
    "tests/helper.py": "HELP = 1\n",
    "tests/results/run.json": "{}",
    "tests/engine/__init__.py": "",
    "tests/engine/conftest.py": "",
    "tests/engine/recorded/one.json": "{}",
    "tests/engine/test_step.py": "from streamserve.engine import step\n",
    "tests/test_llm.py": "from streamserve import LLM\n",
    "tests/test_served.py": "COMMAND = ['-m', 'streamserve']\n",
    "tests/test_page.py": "PAGE = ROOT / 'README.md'\n",
    "tests/docs/test_links.py": "",
    "tests/test_figures.py": "from benchmarks.figures import page\nFOLDER = ROOT / 'tests'\n",
    "benchmarks/__init__.py": "",
    "benchmarks/report.py": "from benchmarks.figures import page\n",
    "benchmarks/results/star.json": "{}",
    "benchmarks/figures/__init__.py": "",
    "benchmarks/figures/page.py": "",
}
AROUND = {"tests/__init__.py", "tests/conftest.py", "tests/helper.py", "pyproject.toml"}
PACKAGE = {"src/streamserve/__init__.py"}
ENGINE = {
    "src/streamserve/engine/__init__.py",
    "src/streamserve/engine/step.py",
    "src/streamserve/engine/cpp/step.cpp",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.fixture
def closure(repository: Path) -> Callable[[str], set[str]]:
    tree = read(repository, None)
    return lambda name: set(tree.closure([name]))


def test_a_test_depends_on_packages_helpers_and_data(closure: Callable[[str], set[str]]) -> None:
    own = {"tests/engine/test_step.py", "tests/engine/__init__.py", "tests/engine/conftest.py"}
    recorded = {"tests/engine/recorded/one.json"}
    assert closure("tests/engine/test_step.py") == own | recorded | AROUND | PACKAGE | ENGINE


def test_a_name_of_a_package_brings_its_module(closure: Callable[[str], set[str]]) -> None:
    assert (
        closure("tests/test_llm.py")
        == {"tests/test_llm.py", "src/streamserve/llm.py"} | AROUND | PACKAGE | ENGINE
    )
    assert "src/streamserve/llm.py" not in closure("tests/engine/test_step.py")


def test_the_command_line_reaches_the_whole_package(closure: Callable[[str], set[str]]) -> None:
    source = {name for name in FILES if name.startswith("src/")}
    assert closure("tests/test_served.py") == {"tests/test_served.py"} | AROUND | source


def test_a_page_counts_without_what_is_rendered(repository: Path) -> None:
    before = read(repository, None)
    assert "README.md" in before.closure(["tests/test_page.py"])
    (repository / "README.md").write_text("It takes <!--=seconds-->4 s<!--/-->.\n")
    assert read(repository, None).content(["tests/test_page.py"]) == before.content(["tests/test_page.py"])
    (repository / "README.md").write_text("It took <!--=seconds-->4 s<!--/-->.\n")
    assert read(repository, None).content(["tests/test_page.py"]) != before.content(["tests/test_page.py"])


def test_results_depend_on_no_result_and_on_no_page_that_shows_them(
    closure: Callable[[str], set[str]],
) -> None:
    assert closure("benchmarks/report.py") == {
        "benchmarks/report.py",
        "benchmarks/__init__.py",
        "pyproject.toml",
    }
    assert closure("tests/docs/test_links.py") == set(FILES)
    renderer = {"benchmarks/figures/__init__.py", "benchmarks/figures/page.py"}
    assert renderer <= closure("tests/test_figures.py"), "a test of the renderer itself"
    assert not {"benchmarks/results/star.json", "tests/docs/test_links.py"} & closure("tests/test_figures.py")


@pytest.mark.parametrize("changed", ["src/streamserve/engine/step.py", "src/streamserve/engine/cpp/step.cpp"])
def test_content_changes_with_any_file_of_the_closure(repository: Path, changed: str) -> None:
    cache = repository / "build" / "dependencies.json"
    tests = ("tests/engine/test_step.py", "tests/test_page.py")
    before = [read(repository, cache).content([name]) for name in tests]
    assert [read(repository, cache).content([name]) for name in tests] == before, "from the cache"
    (repository / changed).write_text("# another\n")
    after = [read(repository, cache).content([name]) for name in tests]
    assert after[0] != before[0]
    assert after[1] == before[1]
    (repository / changed).write_text(FILES[changed])
    assert [read(repository, cache).content([name]) for name in tests] == before, (
        "whatever the time of change"
    )


@pytest.mark.parametrize("text", ["", "{}", '{"rules": "other", "files": {}}', "no JSON"])
def test_a_cache_that_cannot_be_used_is_replaced(repository: Path, text: str) -> None:
    cache = repository / "build" / "cache.json"
    cache.parent.mkdir()
    cache.write_text(text)
    assert read(repository, cache).files == read(repository, None).files
    assert len(cache.read_text()) > 1000


def test_distances_count_imports(repository: Path) -> None:
    found = read(repository, None).distances(["src/streamserve/engine/step.py"])
    assert found["tests/engine/test_step.py"] == 1
    assert found["tests/test_llm.py"] == 2
    assert "tests/test_served.py" not in found, "it starts a program"


def test_a_missing_file_is_an_error(repository: Path) -> None:
    with pytest.raises(KeyError, match=r"gone\.py"):
        read(repository, None).closure(["tests/gone.py"])


@pytest.fixture(scope="module")
def real() -> Tree:
    return read()


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("tests/campaigns/families.py", "tests/campaigns/soak.py"),
        ("tests/test_workers.py", "src/streamserve/workers/worker.py"),
        ("tests/test_workers.py", "src/streamserve/execution/backends/native/cpp/pool.cpp"),
        ("tests/test_workers.py", "src/streamserve/embedded/target/model.safetensors"),
        ("tests/api/test_recorded.py", "tests/api/conftest.py"),
        ("tests/test_serve.py", "src/streamserve/extras/web_page/web/main.js"),
        (
            "tests/execution/backends/cuda/test_layers.py",
            "src/streamserve/execution/backends/cuda/kernels/__init__.py",
        ),
        ("tests/extras/cluster/test_late_writes.py", "tests/lifecycle_events/sitecustomize.py"),
        ("benchmarks/speculation/speculation.py", "benchmarks/data/acceptance.npz"),
        ("tests/docs/test_figures.py", "tests/results/verify.json"),
        ("tests/docs/test_benchmarks.py", "CONTRIBUTING.md"),
        ("tests/test_import_rules.py", "tests/api/test_chat.py"),
        ("tests/benchmarks/test_report.py", "benchmarks/figures/__init__.py"),
    ],
)
def test_what_files_of_this_repository_reach(real: Tree, name: str, reached: str) -> None:
    assert reached in real.closure([name])


def test_most_changes_leave_some_tests_out(real: Tree) -> None:
    closures = {name: set(real.closure([name])) for name in real.tests()}
    for source in ("src/streamserve/api/app.py", "src/streamserve/fleet/runtime.py"):
        affected = [name for name, closure in closures.items() if source in closure]
        assert 20 < len(affected) < len(closures) * 0.75
    assert "src/streamserve/fleet/runtime.py" not in closures["tests/scheduling/test_slo_admission.py"]
