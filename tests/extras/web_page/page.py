"""Helpers of the page's tests: a scripted model, a browser, and a person's actions on the page."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from streamserve.api.generator import Item
from streamserve.fleet.view import CandidateView, DecisionView, MachineView, RouterView, WorkerView
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import SloOutcome
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer
from tests.api.serving import Script, Served
from tests.api.tool_calls import CALL

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
]
NARROW: ViewportSize = {"width": 390, "height": 760}
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
MARKDOWN = f"""## Steps

1. **Bold** and *slanted*, `a < b`
   - nested
2. [a link](https://example.org/x), [a trap](javascript:document.title='taken'), ![picture](https://example.org/y.png)

{EVIL}

| a | b |
|---|--:|
| {EVIL} | 2 |

```python {EVIL}
def f(x):  # {EVIL}
    return "{"long " * 60}"
```

> quoted
"""
FORMULAS = r"""It costs $5 and $6-$7, while \(x_1 * y_1\) and $\alpha_*$ are formulas:
\[
\frac{a}{b}
+ c_1 * d_1
\]
$$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$$

A wrong one: \(\frac{x_1}{*y*\).

the end \(x_1"""
WORKERS = [
    WorkerView(f"{role}-0", True, False, 1, queued, 100, decoding, live, 1000, 0.1, host)
    for role, queued, decoding, live, host in (("prefill", 3, 0, 120, "red"), ("decode", 0, 5, 640, "blue"))
]
DECISION = DecisionView(
    "r", 2.0, 345, "prefill-0 → decode-0", "best score", [CandidateView("prefill-0 → decode-0", 16, 0.87)]
)
MACHINES = [
    MachineView("red", 2, ["prefill-0"], 75.0, 0.2),
    MachineView("blue", 1, ["decode-0"], 12.0, 1.4),
]
PAIR = RouterView("flowguard", WORKERS, 1, [DECISION], MACHINES)


class Playbook:
    """What the scripted model answers to the last message, the prompts that it received, and how many answers
    ended early."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        self.abandoned = 0

    def script(self) -> Script:
        async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            self.prompts.append(text)
            self.params.append(params)
            last = text.rsplit("<|im_start|>", 2)[-2]
            if "forever" in last:
                async for item in self._forever():
                    yield item
            pieces = next((pieces for word, pieces in self.lines().items() if word in last), ["hello"])
            for number, piece in enumerate(pieces):
                yield ChoiceDelta(0, piece, (72,) * (1 + 2 * (number > 0)))
                await asyncio.sleep(0.01)
            yield ChoiceDelta(0, tokens=(3,), finish="stop")
            slo = SloOutcome(met=False, ttft_ms=12.5, tpot_ms=80.0) if params.slo.tpot_ms else None
            count = 3 * len(pieces) - 1
            yield Usage(len(prompt), count, cached_tokens=8, drafted_tokens=9, accepted_tokens=6, slo=slo)

        return script

    @staticmethod
    def lines() -> dict[str, list[str]]:
        return {
            "markdown": re.findall(r".{1,40}", MARKDOWN, re.DOTALL),
            "formulas": [FORMULAS],
            "think": ["<think>\nSo ", "what?\n</think>\n\n", "Yes", "."],
            "weather": [CALL],
            "sunny": ["It is sunny."],
            "count": [f"{number} " for number in range(10)],
        }

    async def _forever(self) -> AsyncGenerator[Item, None]:
        try:
            for _ in range(3000):
                yield ChoiceDelta(0, "more ", (72,))
                await asyncio.sleep(0.01)
        finally:
            self.abandoned += 1


@contextmanager
def launched() -> Iterator[Browser]:
    """A headless Chromium. Skips the test on machines without one."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Browser, stage: Served, tolerated: str = "nothing") -> Iterator[Page]:
    """Yield the page in a browser without history. No request may leave the origin, and the browser may
    report only the errors in `tolerated`."""
    context = browser.new_context(viewport={"width": 1100, "height": 760})
    page = context.new_page()
    complaints: list[str] = []
    elsewhere: list[str] = []
    context.on("console", lambda text: complaints.append(text.text) if text.type == "error" else None)
    context.on("weberror", lambda error: complaints.append(str(error.error)))
    context.on("request", lambda sent: None if _is_here(sent.url, stage) else elsewhere.append(sent.url))
    page.goto(stage.url)
    expect(page.locator("#model")).to_have_value("actor")
    expect(page.locator("#key-form")).to_be_hidden()
    yield page
    assert [text for text in complaints if tolerated not in text] == []
    assert elsewhere == []
    assert page.title().startswith("streamserve")
    context.close()


def _is_here(url: str, server: Served) -> bool:
    return url.startswith((server.url + "/", "blob:" + server.url))


def say(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.keyboard.press("Enter")


def answered(page: Page, text: str | re.Pattern[str]) -> None:
    """Wait until the last answer is complete and has a text."""
    answer = page.locator(".message").last
    expect(answer.locator(".markdown").last).to_contain_text(text)
    expect(answer).not_to_have_class(re.compile("busy"))


def drop(page: Page, *files: tuple[str, str]) -> None:
    """Drop text files onto the page."""
    transfer = page.evaluate_handle(
        """(files) => { const data = new DataTransfer();
            for (const [name, text] of files) data.items.add(new File([text], name)); return data; }""",
        files,
    )
    for event in ("dragover", "drop"):
        page.dispatch_event("body", event, {"dataTransfer": transfer})


def stored(page: Page) -> list[Any]:
    texts = page.evaluate(
        "Object.entries(localStorage).filter(([name]) => name.includes('chat')).map((e) => e[1])"
    )
    return [json.loads(text) for text in texts]


def no_sideways_scroll(page: Page) -> None:
    script = """[document.documentElement, ...document.querySelectorAll('main, section, #log')]
        .filter((part) => part.scrollWidth > part.clientWidth + 1).map((part) => part.id || part.tagName)"""
    assert page.evaluate(script) == []
