"""Pictures of the page for the docs."""

import io
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, expect

from tests.extras.web_page.page import NARROW, drop, launched, say
from tests.serving import serving

SHOTS = os.environ.get("PAGE_SCREENSHOTS")
"""The folder for pictures of the page."""


def test_pictures_for_the_docs() -> None:
    """Take pictures for the docs, only if PAGE_SCREENSHOTS names a folder. The packaged model generates the
    texts."""
    if not SHOTS:
        return
    folder = Path(SHOTS)
    with launched() as browser, serving("embedded", "--pairs", "2", "--threads", "1") as served:
        page = browser.new_page(viewport={"width": 1120, "height": 720})
        page.goto(served.url)
        page.click("#to-settings")
        for name, value in POSE.items():
            page.fill(f"#setting-{name}", str(value))
        page.press("#setting-tpot_ms", "Tab")
        page.click("#close-settings")
        for text in ("Hello!", "What is 12 + 7?", "Write a function that returns the larger of two numbers."):
            say(page, text)
            expect(page.locator("#send")).to_be_visible(timeout=30_000)
        page.mouse.move(0, 0)
        picture(page, folder / "page-chat.png")
        drop(page, ("minutes.txt", "The meeting is on Monday. " * 40))
        page.fill("#text", "When is the meeting?")
        expect(page.locator("#ahead-text")).to_have_text(
            re.compile(r"^3\d\d of 3\d\d tokens"), timeout=30_000
        )
        page.set_viewport_size(NARROW)
        page.emulate_media(color_scheme="dark")
        page.evaluate("document.getElementById('log').scrollTop = 1e9")
        picture(page, folder / "page-narrow.png")
        page.fill("#text", "")
        page.get_by_label("Remove minutes.txt").click()
        expect(page.locator("#ahead")).to_be_hidden()  # the stream has been deleted
        page.set_viewport_size({"width": 1120, "height": 1000})
        page.emulate_media(color_scheme="light")
        page.click("#to-fleet")
        under_load(page, served.url)
        picture(page, folder / "page-fleet.png")
        page.close()


POSE = {"temperature": 0, "ttft_ms": 200, "tpot_ms": 50}
"""Settings of the chat in the pictures."""


def under_load(page: Page, url: str) -> None:
    """Send requests for 100 seconds, with a varying number at a time, while the page is open."""
    body = {"messages": [{"role": "user", "content": "Write a story about a ship."}], "ignore_eos": True}
    body |= {"max_tokens": 120, "slo": {"tpot_ms": 25}, "temperature": 0.8}
    with ThreadPoolExecutor(24) as senders, httpx.Client(base_url=url, timeout=120) as client:
        for second in range(50):
            for _ in range(round(1.5 + 1.5 * math.sin(second / 6))):
                senders.submit(client.post, "/v1/chat/completions", json={**body, "seed": second})
            page.wait_for_timeout(2000)


def picture(page: Page, file: Path) -> None:
    """Save a picture of the page, of at most 150 KB."""
    page.wait_for_timeout(300)
    shot = Image.open(io.BytesIO(page.screenshot()))
    shot.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    assert file.stat().st_size < 150_000
