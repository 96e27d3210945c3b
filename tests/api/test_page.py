"""The page at /: one file that needs nothing from elsewhere, and works in a browser."""

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, expect, sync_playwright

from streamserve.api.generator import Item
from streamserve.api.ops.page import content_security_policy
from streamserve.api.settings import ApiSettings
from streamserve.protocol.keys import digest
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import Delta, Usage
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.test_metrics import REPORT
from tests.serving import serving

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SHOT = os.environ.get("PAGE_SCREENSHOT")
"""A file for a picture of the page at work."""


class Parts(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= {(name, value or "") for name, value in attrs}
        self.ids |= {value for name, value in attrs if name == "id" and value}
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_needs_nothing_from_elsewhere(hello: Served) -> None:
    reply = hello.http.get("/")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = Parts(reply.text)
    assert not page.open
    assert {value for name, value in page.attributes if name in ("src", "href")} == {"data:,"}
    assert not {name for name, _ in page.attributes if name.startswith("on") or name == "style"}
    assert "http" not in re.sub(r"<!doctype.*?>", "", reply.text)


def test_every_part_that_its_script_looks_for_is_there(hello: Served) -> None:
    text = hello.http.get("/").text
    fields = set(re.findall(r'\b(?:at|show)\("(\w[\w-]*)"', text))
    assert len(fields) > 12
    assert fields <= Parts(text).ids


def test_only_its_own_script_may_run(hello: Served) -> None:
    reply = hello.http.get("/")
    policy = reply.headers["content-security-policy"]
    assert policy == content_security_policy(reply.content)
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    (script,) = re.findall(rb"<script>(.*?)</script>", reply.content, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(script).digest()).decode() in policy
    assert not re.search(rb"innerHTML|eval|localStorage|sessionStorage|document\.cookie|Function\(", script)


def test_it_reads_metrics_that_exist(server: Served, generator: ScriptedGenerator) -> None:
    named = set(re.findall(r'"(\w+_(?:total|seconds|perc|running|waiting))"', server.http.get("/").text))
    named |= set(re.findall(r'streamserve:(\w+)"', server.http.get("/").text))
    there = server.http.get("/metrics").text
    assert len(named) >= 7
    missing = {name for name in named if f"streamserve:{name}" not in there}
    of_pairs = {name for name in named if name.startswith("kv_transfer")}  # one worker moves nothing
    assert len(of_pairs) == 6
    assert missing <= {"step_floor_seconds_total"} | of_pairs
    with scripted(generator.replaced(latest_report=replace(REPORT, transfer=TransferReport()))) as pair:
        there = pair.http.get("/metrics").text
        assert all(f"streamserve:{name}" in there for name in of_pairs)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def test_it_shows_what_the_engine_does_and_chats(browser: Browser, server: Served) -> None:
    page = browser.new_page(viewport={"width": 960, "height": 820})
    complaints: list[str] = []
    page.on("console", lambda text: complaints.append(text.text) if text.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("tiny", timeout=10_000)
    page.fill("#text", "Tell me all")
    page.keyboard.press("Enter")
    answer = page.locator(".assistant")
    expect(answer).not_to_be_empty(timeout=10_000)
    expect(page.locator("#tokens")).not_to_have_text("–", timeout=10_000)
    page.wait_for_function("Number(document.getElementById('tokens').textContent) > 0")
    page.wait_for_function("Number(document.getElementById('running').textContent) > 0")
    for id in ("ttft", "tpot", "kv", "waiting"):
        expect(page.locator(f"#{id}")).to_have_text(re.compile(r"[\d.]+"))
    assert len((page.locator("#speed polyline").get_attribute("points") or "").split()) >= 1
    if page.locator("#stop").is_visible():
        page.click("#stop")
    expect(page.locator("#stop")).to_be_hidden(timeout=10_000)
    page.click("#clear")
    assert page.locator(".message").count() == 0
    assert not complaints
    page.close()


def test_it_asks_for_the_key_and_keeps_it_to_itself(browser: Browser, generator: ScriptedGenerator) -> None:
    key = "key-of-the-page"
    with scripted(generator, ApiSettings(api_keys=(digest(key),))) as server:
        context = browser.new_context(http_credentials={"username": "me", "password": key})
        page = context.new_page()
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("this server requires an API key", timeout=10_000)
        page.fill("#text", "hi")
        page.click("button[type=submit]")
        expect(page.locator(".error")).to_contain_text("a key is required")
        page.fill("#key", key)
        page.fill("#text", "hi")
        page.click("button[type=submit]")
        expect(page.locator(".assistant").last).to_have_text("hello")
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert json.loads(kept) == [{}, {}, ""]
        page.reload()
        assert page.input_value("#key") == ""
        context.close()


def test_what_a_model_says_is_text_and_nothing_else(browser: Browser, generator: ScriptedGenerator) -> None:
    text = "<img src=x onerror=alert(1)><script>document.title='taken'</script>"

    async def evil(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        yield Delta(0, text, (72,), finish="stop")
        yield Usage(len(prompt), 1)

    with scripted(generator.replaced(script=evil)) as server:
        page = browser.new_page()
        page.goto(server.url)
        page.fill("#text", "hi")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant")).to_have_text(text)
        assert page.title() == "streamserve"
        assert page.locator("#messages img").count() == 0
        page.close()


def test_a_picture_of_it(browser: Browser) -> None:
    """Made only when asked for: PAGE_SCREENSHOT names the file, and the packaged model poses."""
    if not SHOT:
        return
    with serving("embedded", "--threads", "1") as served:
        page = browser.new_page(viewport={"width": 960, "height": 760})
        page.goto(served.url)
        for text in ("Hello!", "Who are you?", "Write a function that returns the larger of two numbers."):
            page.fill("#text", text)
            page.keyboard.press("Enter")
            page.wait_for_timeout(2500)
        page.screenshot(path=str(Path(SHOT)))
        page.close()
