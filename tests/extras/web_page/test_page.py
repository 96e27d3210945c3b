"""The page at /, tested without a browser: its files load nothing from elsewhere, and only its own script may
run."""

import hashlib
import re
import tomllib
from collections.abc import AsyncGenerator
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamserve.api.generator import Item
from streamserve.api.settings import ApiSettings
from streamserve.extras.web_page.page import ASSETS, FILES, content_security_policy
from streamserve.protocol.keys import digest
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import SloOutcome
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.reports import REPORT
from tests.api.serving import ScriptedGenerator, Served, scripted

VENDORED = {"temml.js"}
SCRIPTS = {
    name: text.decode() for name, text in FILES.items() if name.endswith(".js") and name not in VENDORED
}
STYLES = {name: text.decode() for name, text in FILES.items() if name.endswith(".css")}
PAGES = {name: text.decode() for name, text in FILES.items() if name.endswith(".html")}
TEMML = "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95"
"""SHA-256 of dist/temml.min.js in version 0.13.5 of the npm package."""
NO_END = {"meta", "link", "input", "path", "rect", "circle", "use"}


class Parts(HTMLParser):
    """The ids, attributes and open tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.attributes: set[tuple[str, str]] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {(name, value or "") for name, value in attrs}
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in NO_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {(name, value or "") for name, value in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_from_elsewhere(name: str) -> None:
    page = Parts(PAGES[name])
    assert not page.open
    assert len(page.ids) == len(set(page.ids))
    links = {value for name, value in page.attributes if name in ("src", "href")}
    assert {link for link in links if "://" in link or link.startswith("//")} == set()
    for link in links:
        if link.startswith("{assets}/"):
            assert link.removeprefix("{assets}/") in FILES
    assert not {name for name, _ in page.attributes if name.startswith("on") or name == "style"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_makes_no_markup_of_text(name: str) -> None:
    script = SCRIPTS[name]
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|cookie"
    assert not re.search(forbidden, re.sub(r"^\s*//.*$", "", script, flags=re.MULTILINE))
    imported = re.findall(r'^import .*? from "(.+?)";$', script, re.MULTILINE)
    assert all(module.removeprefix("./") in SCRIPTS for module in imported)
    assert {f"./{name}" for name in VENDORED} >= set(re.findall(r'\bimport\("(.+?)"\)', script))
    assert len(imported) == len(re.findall(r"\bimport\b(?!\()", re.sub(r"[\"'].*?[\"']|//.*", "", script)))
    assert len(script.splitlines()) < 400


def test_the_converter_of_formulas_is_the_published_file() -> None:
    comment, _, rest = FILES["temml.js"].partition(b"*/\n")
    assert b"Temml 0.13.5" in comment
    assert b"MIT License" in comment
    published = rest.removesuffix(b"\nexport default temml;\n")
    assert hashlib.sha256(published).hexdigest() == TEMML


@pytest.mark.parametrize("name", STYLES)
def test_a_style_loads_nothing(name: str) -> None:
    assert not re.search(r"url\(|@import|http", STYLES[name])


def test_every_part_that_a_script_looks_for_is_there() -> None:
    scripts = "".join(text for name, text in SCRIPTS.items() if name != "docs.js")
    named = set(re.findall(r'\bat\("([\w-]+)"\)', scripts))
    assert len(named) > 40
    common = PAGES["icons.html"] + PAGES["nav.html"]
    ids = set(Parts(PAGES["index.html"] + common).ids)
    assert named <= ids
    icons = set(re.findall(r'icon(?:Button)?\("(\w+)"', "".join(SCRIPTS.values())))
    assert len(icons) >= 10
    assert {f"icon-{name}" for name in icons} <= ids
    named = set(re.findall(r'\bat\("([\w-]+)"\)', SCRIPTS["docs.js"] + SCRIPTS["frame.js"]))
    assert named <= set(Parts(PAGES["docs.html"] + common).ids)


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_only_scripts_with_its_nonce_may_run(hello: Served, path: str) -> None:
    first, second = hello.http.get(path), hello.http.get(path)
    nonces = [re.findall(r'nonce="([^"]+)"', reply.text)[0] for reply in (first, second)]
    assert nonces[0] != nonces[1]
    assert len(nonces[0]) >= 22
    assert first.headers["content-security-policy"] == content_security_policy(nonces[0])
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert first.headers["cache-control"] == "no-store"
    assert "unsafe" not in first.headers["content-security-policy"]
    assert not re.search(r"{(?:assets|nonce|title|contents|routes|icons|nav)}", first.text)
    assert first.text.count("<script") == 1


def test_files_are_served_by_version_and_kept(hello: Served) -> None:
    assert ASSETS in hello.http.get("/").text
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    served = [name for name in FILES if name.rpartition(".")[2] in types]
    assert len(served) > 12
    for name in served:
        reply = hello.http.get(f"/{ASSETS}/{name}")
        assert reply.content == FILES[name]
        assert reply.headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["0123456789abcdef/main.js", "VERSION/missing.js", "VERSION/index.html"])
def test_other_files_are_not_served(hello: Served, path: str) -> None:
    reply = hello.http.get("/assets/" + path.replace("VERSION", ASSETS.rpartition("/")[2]))
    assert reply.status_code == 404
    assert "reload" in reply.json()["error"]["message"]


def test_the_page_needs_no_key_and_what_it_calls_does(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(api_key=(digest("a-key"),))) as server:
        assert server.http.get("/").status_code == 200
        assert server.http.get(f"/{ASSETS}/main.js").status_code == 200
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/assets").status_code == 401


def test_it_reads_metrics_that_exist(generator: ScriptedGenerator) -> None:
    script = SCRIPTS["fleet.js"]
    named = {
        name
        for call in re.findall(r"\b(?:rate|ratio|gauge)\(([^)]*)\)", script)
        for name in re.findall(r'"(\w+)(?: met)?"', call)
    }
    named |= set(re.findall(r'needs: "(\w+)"', script)) | set(re.findall(r"sums\.(\w+)", script))
    named |= {
        f"{name}_{part}" for name in re.findall(r'\bmean\("(\w+)"', script) for part in ("sum", "count")
    }
    assert len(named) > 18
    report = replace(REPORT, transfer=TransferReport(), step_floor_seconds=0.1)

    async def punctual(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for finish in (None, "stop"):
            yield ChoiceDelta(0, "x", (72,), finish=finish)
        yield Usage(len(prompt), 2, slo=SloOutcome(True, 1.0, 1.0))

    with scripted(generator.replaced(latest_report=report, script=punctual)) as pair:
        body = {"messages": [{"role": "user", "content": "hi"}], "slo": {"ttft_ms": 1000}}
        assert pair.http.post("/v1/chat/completions", json=body).status_code == 200
        there = pair.http.get("/metrics").text
    assert {name for name in named if f"\nstreamserve:{name}" not in there} == set()


def test_the_files_are_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["streamserve.extras.web_page"]
    assert all(fnmatch(f"web/{name}", pattern) for name in FILES)
