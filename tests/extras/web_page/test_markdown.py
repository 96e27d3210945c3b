"""The page's Markdown as elements, and in a time that is linear in its length. Needs Node.js; skipped on
machines without it."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streamserve.extras.web_page.page import FILES

RUNNER = Path(__file__).parent / "markdown_runner.mjs"
NODE = shutil.which("node")
FORMULA = """import { el } from "./dom.js";
export const formula = (source) => el("span", { text: source });
"""
"""A replacement of formula.js, which needs a browser."""

CHARACTERS = 4_750
"""The length of the shorter texts that are measured. Paragraphs of more than 20,000 characters are not
formatted."""
GROWTH = 12.0
"""Upper limit of the growth of time with four times the length: 4 if it is linear, 16 if it is quadratic."""
COST = 40.0
"""Upper limit of the time in times of that of ordinary text of the same length."""

RENDERED = {
    "# About C#": "<h3>About C#</h3>",
    "## Closed ##": "<h4>Closed</h4>",
    "#": "<p>#</p>",
    "**a *b* c** and ***d***": "<p><strong>a <em>b</em> c</strong> and <strong><em>d</em></strong></p>",
    "snake_case_name and _a_, 2 * 3 * 4": "<p>snake_case_name and <em>a</em>, 2 * 3 * 4</p>",
    "`` a ` b `` and `c": "<p><code>a ` b</code> and `c</p>",
    "*a `b*` c*": "<p><em>a <code>b*</code> c</em></p>",
    "*a ``b*` c*": "<p><em>a ``b</em>` c*</p>",
    '[a](https://b.c "d") [e](https://f.g/(h))': "<p><a https://b.c>a</a> <a https://f.g/(h)>e</a></p>",
    "[a [b](https://c.d) ![](https://e.f/g.png)": (
        "<p><a https://c.d>a [b</a> <a https://e.f/g.png>https://e.f/g.png</a></p>"
    ),
    "[a](b c) [d\ne](https://f.g) [h]": "<p>[a](b c) [d<br></br>e](<a https://f.g>https://f.g</a>) [h]</p>",
    r"\*a\* \`b`": "<p>*a* `b`</p>",
    r"\(a\) $b\$$ $$c$$ costs $5 or $6, \(d": (
        r"<p><span>\(a\)</span> <span>$b\$$</span> <span>$$c$$</span> costs $5 or $6, \(d</p>"
    ),
    "\\[\na\n\\]\nb": "<p><span>\\[\na\n\\]</span></p><p>b</p>",
    "a|b\n:-|-:\nc\\|d|e": (
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>c|d</td><td>e</td></tr></tbody></table></div>"
    ),
    "a|b\n-|x": "<p>a|b<br></br>-|x</p>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "- a\n  - b\n- [x] c": "<ul><li>a<ul><li>b</li></ul></li><li><input></input> c</li></ul>",
    "~~~ text\n*a*\n~~~\nb": (
        "<figure><figcaption><span>text</span><button><svg><use></use></svg></button></figcaption>"
        "<pre><code>*a*</code></pre></figure><p>b</p>"
    ),
}
"""Texts and their elements, with the addresses of links."""

REPEATED = (
    "[", "]", "[]", "[](", "![", "](", "[a](b", "[a](b)", "[[a](b)](c) ", "(", ")", "()", "`", "` ", "``a` ",
    "*", "* ", "*a ", "a*", "**a ", "*a**b ", "***a", "_", "_a ", "_a", "__a ", "*a _b ", "~", "~~a ", "*`",
    "*[", "_*", "$", "$a ", "$$a ", "\\(", "\\", "\\`", "|", "|a", "|-", "||\n", "a|b\n-|-\n", '"', "'",
    '[a](b "', "<https://", "http://", "> ", "> a\n", "#", "# ", " ", "\t", "- ", "1. ",
    "- a\n  - b\n    - c\n", "~~~\n", "a\n", "\\[\n", "$$a\nb\n", "1. a\n   ```\n   x\n   ```\n\nb\n\n",
)  # fmt: skip
BETWEEN = (
    ("# a", " ", "b"), ("# ", "#", "x"), ("```", " ", "`"), ("", "~", "`"), ("- ", " ", "\u2028b"),
    ("* ", "* ", "x"), ("a|b\n-", " ", "x"), ("a|b\n", " ", "x-"), ("` ", "a", "`"), ("`", "[", "](a)"),
    ("[a](", "b", ""), ("[a](b", " ", "x"), ("![", "a", "](b)"), ("a", "\\(", "\\)"), ("*a ", "`b ", "*"),
    ("http://", ".", ""), ("- a\n  ```\n", "a\n", ""),
)  # fmt: skip
MEASURED = [*(("", text, "") for text in REPEATED), *BETWEEN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's scripts as modules of Node.js."""
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {name: text for name, text in FILES.items() if name.endswith(".js")}
    for name, text in {
        **scripts,
        "formula.js": FORMULA.encode(),
        "package.json": b'{"type": "module"}',
    }.items():
        (folder / name).write_bytes(text)
    return folder


def run(folder: Path, **work: Any) -> Any:
    if NODE is None:
        pytest.skip("there is no Node.js on this machine (Debian: apt install nodejs)")
    command = [NODE, str(RUNNER), str(folder)]
    done = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rendered(folder: Path) -> dict[str, str]:
    return dict(zip(RENDERED, run(folder, texts=list(RENDERED))["elements"], strict=True))


@pytest.fixture(scope="module")
def measured(folder: Path, pytestconfig: pytest.Config) -> dict[tuple[str, str, str], dict[str, float]]:
    if not pytestconfig.getoption("--full"):
        pytest.skip("with --full: other tests that run meanwhile disturb times")
    results = run(folder, measured=MEASURED, characters=CHARACTERS)["measured"]
    return dict(zip(MEASURED, results, strict=True))


@pytest.mark.parametrize("text", RENDERED)
def test_a_text_as_elements(rendered: dict[str, str], text: str) -> None:
    assert rendered[text] == RENDERED[text]


@pytest.mark.parametrize("text", MEASURED, ids=repr)
def test_the_time_is_linear_in_the_length(
    measured: dict[tuple[str, str, str], dict[str, float]], text: tuple[str, str, str]
) -> None:
    assert measured[text]["growth"] < GROWTH
    assert measured[text]["cost"] < COST
