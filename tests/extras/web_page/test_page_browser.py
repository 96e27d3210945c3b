"""The page works in a headless Chromium: chat, prompt streams, fleet, /docs. Skipped on machines without
one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from streamserve.api.settings import ApiSettings
from streamserve.protocol.keys import digest
from streamserve.protocol.reports import TransferReport
from streamserve.text.tokenizer import Tokenizer
from tests.api.reports import REPORT
from tests.api.serving import ScriptedGenerator, Served, scripted
from tests.api.tool_calls import TEMPLATE, WEATHER
from tests.extras.web_page.page import (
    EVIL,
    MARKDOWN,
    NARROW,
    PAIR,
    Playbook,
    answered,
    drop,
    launched,
    no_sideways_scroll,
    opened,
    say,
    stored,
)
from tests.text.folders import byte_level_folder

FIRST, SECOND = "0" * 16, "1" * 16
CYCLE = json.dumps(
    {
        "id": FIRST,
        "title": "",
        "created": 1,
        "updated": 1,
        "settings": {},
        "head": FIRST,
        "nodes": {
            FIRST: {"id": FIRST, "parent": SECOND, "role": "user", "content": ""},
            SECOND: {"id": SECOND, "parent": FIRST, "role": "user", "content": ""},
        },
    }
)
"""A conversation in which two messages alternate."""


@pytest.fixture(scope="module")
def playbook(tmp_path_factory: pytest.TempPathFactory) -> Playbook:
    folder = byte_level_folder(tmp_path_factory.mktemp("page"), chat_template=TEMPLATE)
    return Playbook(Tokenizer.from_folder(folder))


@pytest.fixture(scope="module")
def actor(playbook: Playbook) -> ScriptedGenerator:
    generator = ScriptedGenerator(playbook.tokenizer, playbook.script(), served_names=("actor", "<b>other"))
    model = msgspec.structs.replace(generator.model, max_model_len=50_000)
    report = msgspec.structs.replace(REPORT, transfer=TransferReport(handed_over=7))
    return generator.replaced(model=model, router_view=PAIR, latest_report=report)


@pytest.fixture(scope="module")
def stage(actor: ScriptedGenerator) -> Iterator[Served]:
    with scripted(actor) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def page(browser: Browser, stage: Served) -> Iterator[Page]:
    with opened(browser, stage) as page:
        yield page


def test_the_page_says_that_the_server_is_gone_and_back(browser: Browser, stage: Served) -> None:
    with opened(browser, stage, tolerated="Failed to load resource") as page:
        expect(page.locator("#state")).to_have_text("ready")
        page.route("**/health", lambda route: route.abort())
        expect(page.locator("#state")).to_have_text("no connection", timeout=2500)
        page.route("**/health", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"))
        page.wait_for_timeout(2000)
        expect(page.locator("#state")).to_have_text("no connection")
        page.unroute("**/health")
        expect(page.locator("#state")).to_have_text("ready", timeout=2500)


def test_a_chat_with_figures(page: Page, playbook: Playbook) -> None:
    page.click("#to-settings")
    for name, value in (("temperature", "0.5"), ("seed", "7"), ("max_tokens", "99"), ("tpot_ms", "50")):
        page.fill(f"#setting-{name}", value)
    page.fill("#setting-system", "Be brief.")
    page.press("#setting-system", "Tab")
    expect(page.locator("#settings-count")).to_have_text("5")
    page.click("#close-settings")
    say(page, "Please count")
    answered(page, "0 1 2 3 4 5 6 7 8 9")
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nPlease count" in playbook.prompts[-1]
    params = playbook.params[-1]
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 7, 99)
    figures = page.locator(".message").last.locator(".meta")
    expect(figures.locator(".speed dd")).to_have_text(re.compile(r"^[\d,.]+ tokens/s$"))
    expect(figures.locator(".first-token dd")).to_have_text(re.compile(r"^first token after [\d.]+ m?s$"))
    expect(figures.locator(".tokens dd")).to_have_text("29 tokens")
    expect(figures.locator(".draft-tokens dd")).to_have_text("6 of 9 draft tokens accepted")
    expect(figures.locator(".prompt dd")).to_contain_text("8 cached")
    expect(figures.locator(".target.missed dd")).to_have_text("per token 80 ms, target 50 ms: missed")


def test_a_new_chat_begins_with_the_defaults(page: Page, playbook: Playbook) -> None:
    count = page.locator("#settings-count")
    page.select_option("#model", "<b>other")
    page.click("#to-settings")
    page.fill("#setting-extra", '{"response_format": {"type": "json_object"}, "seed": 3}')
    page.fill("#setting-temperature", "0.5")
    page.press("#setting-temperature", "Tab")
    page.select_option("#setting-ahead", "never")  # settings of the page, not of the conversation
    page.click("#close-settings")
    expect(count).to_have_text("2")
    boxes = [page.locator(name).bounding_box() for name in ("#to-settings .icon", "#settings-count")]
    assert boxes[0]
    assert boxes[1]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    say(page, "Hello")
    answered(page, "hello")
    assert (playbook.params[-1].seed, playbook.params[-1].temperature) == (3, 0.5)
    page.click("#new")
    expect(count).to_be_hidden()
    say(page, "Hello again")
    answered(page, "hello")
    assert playbook.params[-1].seed != 3
    assert playbook.params[-1].temperature == 1
    assert page.input_value("#setting-ahead") == "never"
    assert page.input_value("#model") == "<b>other"
    page.locator("#history .title", has_text="Hello").last.click()
    expect(count).to_have_text("2")


def test_presets_are_saved_chosen_and_deleted(page: Page, playbook: Playbook) -> None:
    preset = page.locator("#preset")
    page.click("#to-settings")
    page.fill("#setting-system", "Be brief.")
    page.fill("#setting-temperature", "0.25")
    page.press("#setting-temperature", "Tab")
    expect(preset.locator("option:checked")).to_have_text("(not saved)")
    page.fill("#preset-name", EVIL[:60])
    page.press("#preset-name", "Enter")
    expect(preset).to_have_value(EVIL[:60])
    page.reload()
    page.click("#new")
    page.click("#to-settings")
    expect(preset).to_have_value("")
    assert page.input_value("#setting-temperature") == ""
    preset.select_option(EVIL[:60])
    assert page.input_value("#setting-temperature") == "0.25"
    expect(page.locator("#settings-count")).to_have_text("2")
    say(page, "Hello")
    answered(page, "hello")
    assert playbook.params[-1].temperature == 0.25
    assert "system\nBe brief." in playbook.prompts[-1]
    preset.select_option("")
    expect(page.locator("#settings-count")).to_be_hidden()
    assert page.input_value("#setting-system") == ""
    preset.select_option(EVIL[:60])
    page.get_by_label("Delete preset").click()
    expect(preset.locator("option")).to_have_text(["Defaults", "(not saved)"])
    assert page.input_value("#setting-temperature") == "0.25"


def test_stop_ends_the_generation(page: Page, playbook: Playbook) -> None:
    before = playbook.abandoned
    say(page, "Go on forever")
    expect(page.locator(".message").last).to_contain_text("more more more")
    # while the answer arrives
    expect(page.locator(".meta .speed dd").last).to_have_text(re.compile("tokens/s"))
    page.keyboard.press("Escape")
    expect(page.locator(".problem.mild").last).to_have_text("Stopped.")
    expect(page.locator("#send")).to_be_visible()
    for _ in range(100):
        if playbook.abandoned > before:
            break
        page.wait_for_timeout(20)
    assert playbook.abandoned == before + 1
    say(page, "And now?")
    answered(page, "hello")
    assert "more more" in playbook.prompts[-1]  # text generated before a stop is part of the context


def test_regenerate_and_edit_keep_what_was_there(page: Page, playbook: Playbook) -> None:
    say(page, "Please count")
    answered(page, "9")
    page.locator(".message").last.get_by_label("Regenerate").click()
    expect(page.locator(".pager")).to_have_text("2 / 2")
    answered(page, "9")
    assert playbook.prompts[-1] == playbook.prompts[-2]
    page.locator(".message.user").hover()
    page.get_by_label("Edit message").click()
    page.fill(".editor textarea", "Something else")
    page.press(".editor textarea", "Enter")
    answered(page, "hello")
    assert "count" not in playbook.prompts[-1]
    page.get_by_label("Previous version").first.click()
    answered(page, "9")
    expect(page.locator(".message.user .typed")).to_have_text("Please count")
    (conversation,) = stored(page)
    assert len(conversation["nodes"]) == 5


def test_history_survives_a_reload_and_stays_in_the_browser(page: Page) -> None:
    say(page, "First words")
    answered(page, "hello")
    page.click("#new")
    say(page, "Second words")
    answered(page, "hello")
    page.reload()
    titles = page.locator("#history .title")
    expect(titles).to_have_text(["Second words", "First words"])
    titles.nth(1).click()
    expect(page.locator(".typed")).to_have_text("First words")
    answered(page, "hello")
    for kind, start in (("Markdown", "# First words"), ("JSON", '{\n  "id"')):
        page.click("#export summary")
        with page.expect_download() as download:
            page.click(f"text=Export as {kind}")
        assert Path(download.value.path()).read_text(encoding="utf-8").startswith(start)
        assert download.value.suggested_filename.startswith("First-words.")
    page.get_by_label("Delete First words").click()
    expect(titles).to_have_text(["Second words"])
    page.click("text=Undo")
    expect(titles).to_have_count(2)
    page.get_by_label("Delete First words").click()
    page.get_by_label("Delete Second words").click()
    expect(titles).to_have_count(0)
    assert stored(page) == []
    assert page.context.cookies() == []


def test_a_reload_keeps_the_open_chat_and_what_has_come_of_an_answer(page: Page) -> None:
    say(page, "First words")
    answered(page, "hello")
    page.click("#new")
    say(page, "Go on forever")
    answer = page.locator(".message.assistant")
    expect(answer).to_contain_text("more more more")
    page.reload()
    expect(page.locator(".typed")).to_have_text("Go on forever")
    expect(answer).to_contain_text("more more more")
    expect(answer.locator(".problem.mild")).to_have_text("Stopped.")
    expect(page.locator("#history li:has([aria-current])")).to_have_text("Go on forever")
    page.click("#new")
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_chats_are_renamed_and_searched(page: Page) -> None:
    for text in ("First words", "Please count"):
        page.click("#new")
        say(page, text)
        answered(page, re.compile("hello|9"))
    titles = page.locator("#history .title")
    page.get_by_label("Rename First words").click()
    page.fill("#history input", EVIL)
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["Please count", EVIL])
    page.get_by_label("Rename Please count").click()
    page.fill("#history input", "Numbers")
    page.keyboard.press("Escape")
    expect(titles.first).to_have_text("Please count")
    page.get_by_label("Rename Please count").click()
    page.fill("#history input", "Numbers")
    page.focus("#text")
    expect(titles.first).to_have_text("Numbers")
    say(page, "Hello")
    answered(page, "hello")  # a title that the user set is kept
    assert {chat["title"] for chat in stored(page)} == {EVIL, "Numbers"}
    for searched, found in (("ONERROR", [EVIL]), ("0 1 2 3", ["Numbers"]), ("hello", ["Numbers", EVIL])):
        page.fill("#search", searched)
        expect(titles).to_have_text(found)
    page.fill("#search", "nowhere")
    expect(page.locator("#history")).to_have_text("Nothing found")
    assert page.locator("aside img").count() == 0


def test_chats_are_exported_and_imported(page: Page, tmp_path: Path) -> None:
    page.click("#to-settings")
    page.fill("#setting-seed", "7")
    page.press("#setting-seed", "Tab")
    page.click("#close-settings")
    drop(page, ("a.txt", "file"))
    say(page, f"markdown {EVIL}")
    answered(page, "quoted")
    page.click("#new")
    say(page, "think")
    answered(page, "Yes.")
    before = sorted(stored(page), key=lambda chat: chat["id"])
    page.click("#transfer summary")
    with page.expect_download() as download:
        page.click("#export-all")
    file = tmp_path / "chats.json"
    download.value.save_as(file)
    notice = page.locator("#notice")
    page.set_input_files("#import-file", file)
    expect(notice).to_have_text("Conversations: 0 imported, 2 were here already.")
    page.evaluate("localStorage.clear()")
    page.set_input_files("#import-file", file)
    expect(notice).to_have_text("Conversations: 2 imported.")
    assert sorted(stored(page), key=lambda chat: chat["id"]) == before
    page.locator("#history .title").last.click()
    answered(page, "quoted")
    expect(page.locator("#settings-count")).to_have_text("1")
    assert page.locator("main img, aside img, main script").count() == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1", "JSON"),
        ('{"id": "../x"}', '"../x" should be an id'),
        ('[{"id": "0123456789abcdef", "title": 1}]', "1 should be a string"),
        (CYCLE, "follows none"),
        (CYCLE.replace("user", "__proto__"), "should be a role"),
        (json.dumps([0] * 2001), "a list of at most 2000"),
    ],
)
def test_other_files_are_not_imported(page: Page, text: str, reason: str) -> None:
    page.set_input_files(
        "#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": text.encode()}
    )
    expect(page.locator("#notice")).to_contain_text("x.json is not an export of conversations: ")
    expect(page.locator("#notice")).to_contain_text(reason)
    assert stored(page) == []


def test_markdown_is_shown_and_markup_is_only_text(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    drop(page, (f"{EVIL}.txt", EVIL))
    expect(page.locator("#attached")).to_contain_text(EVIL)
    say(page, f"markdown {EVIL}")
    answered(page, "quoted")
    expect(page.locator("#jump")).to_be_hidden()  # the log has scrolled with the answer
    answer = page.locator(".message").last
    expect(answer.locator("h4")).to_have_text("Steps")
    expect(answer.locator("strong")).to_have_text("Bold")
    expect(answer.locator("ol ul li")).to_have_text("nested")
    expect(answer.locator("p code, li code")).to_have_text("a < b")
    expect(answer.locator("td").first).to_have_text(EVIL)
    expect(answer.locator("blockquote")).to_have_text("quoted")
    assert answer.locator("a").evaluate_all("(links) => links.map((link) => link.href)") == [
        "https://example.org/x",
        "https://example.org/y.png",
    ]
    expect(answer).to_contain_text(EVIL)
    expect(page.locator("#history .title")).to_contain_text(EVIL[:30])
    assert page.locator("main img, aside img, main script, aside script").count() == 0
    assert page.title() == "streamserve"
    answer.get_by_label("Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()").startswith(f"def f(x):  # {EVIL}\n    return")
    answer.get_by_label("Copy answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == MARKDOWN


def test_formulas_are_shown_and_what_is_none_stays(page: Page) -> None:
    say(page, "formulas")
    answered(page, "the end")
    answer = page.locator(".message").last
    expect(answer.locator("math")).to_have_count(4)
    expect(answer.locator(".formula.display")).to_have_count(2)
    expect(answer.locator("mfrac")).to_have_text("ab")
    expect(answer.locator("mtd")).to_have_count(4)
    expect(answer.locator(".formula.raw")).to_have_text(r"\(\frac{x_1}{*y*\)")
    expect(answer.locator(".markdown p").first).to_contain_text("costs $5 and $6-$7, while")
    expect(answer.locator(".markdown p").last).to_have_text(r"the end \(x_1")
    assert answer.locator("em, li").count() == 0


def test_reasoning_is_folded(page: Page) -> None:
    say(page, "think")
    answered(page, "Yes.")
    thoughts = page.locator(".reasoning")
    expect(thoughts.locator("summary")).to_have_text(re.compile(r"Thought for \d\.\d s"))
    expect(thoughts.locator(".markdown")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".markdown")).to_have_text("So what?")


def test_tool_calls_are_shown_and_take_a_result(page: Page, playbook: Playbook) -> None:
    page.click("#to-settings")
    page.fill("#setting-extra", "[1]")
    page.press("#setting-extra", "Tab")
    expect(page.locator("#setting-extra-help")).to_contain_text("not a JSON object")
    page.fill("#setting-extra", json.dumps({"tools": [WEATHER]}))
    page.press("#setting-extra", "Tab")
    page.click("#close-settings")
    say(page, "weather?")
    call = page.locator(".call")
    expect(call.locator("h3")).to_have_text("Calls get_weather")
    expect(call.locator("pre")).to_contain_text('"city": "Rome"')
    call.locator("textarea").fill("sunny")
    call.get_by_text("Send result").click()
    answered(page, "It is sunny.")
    assert "<|im_start|>tool\nsunny" in playbook.prompts[-1]


def test_dropped_files_are_computed_while_one_types(page: Page, playbook: Playbook) -> None:
    """Dropped files are computed while the user types, by a prompt stream, whose prompt equals that of an
    ordinary request with the same message."""
    say(page, "Before")
    answered(page, "hello")
    drop(page, ("notes.txt", "The sky is green. "), ("data.bin", "\0\1"))
    expect(page.locator("#problem")).to_have_text("data.bin is not a text file.")
    ahead = page.locator("#ahead-text")
    expect(ahead).to_have_text(re.compile(r"^[1-9]\d* of [1-9]\d* tokens computed already$"))
    first = ahead.inner_text()
    page.fill("#text", "What colour is the sky?")
    expect(ahead).not_to_have_text(first)
    drop(page, ("more.txt", "No: it is ```red```."))
    expect(page.locator("#attached li")).to_have_count(2)
    with page.expect_request(lambda sent: sent.method == "DELETE"):  # other settings need another stream
        page.click("#to-settings")
        page.fill("#setting-seed", "5")
        page.press("#setting-seed", "Tab")
    page.click("#close-settings")
    page.fill("#text", "What colour is it?")
    page.get_by_label("Remove notes.txt").click()
    page.focus("#text")
    with page.expect_request("**/finish") as finish:
        page.keyboard.press("Enter")
    answered(page, "hello")
    assert finish.value.method == "POST"
    expect(page.locator(".meta .prompt dd").last).to_have_text(
        re.compile(r"^([\d,]+) of \1 prompt tokens computed before it was sent$")
    )
    expected = "File more.txt:\n````\nNo: it is ```red```.\n````\n\nWhat colour is it?"
    assert (
        f"Before<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\n{expected}<|im_end|>"
        in (playbook.prompts[-1])
    )
    page.locator(".message").last.get_by_label("Regenerate").click()
    expect(page.locator(".pager").last).to_have_text("2 / 2")
    answered(page, "hello")
    assert playbook.prompts[-1] == playbook.prompts[-2]
    assert [params.seed for params in playbook.params[-2:]] == [5, 5]


def test_what_cannot_be_computed_ahead_is_sent_whole(
    browser: Browser, stage: Served, playbook: Playbook
) -> None:
    with opened(browser, stage, tolerated="400 (Bad Request)") as page:
        page.click("#to-settings")
        page.select_option("#setting-reasoning_effort", "low")
        page.select_option("#setting-ahead", "always")
        page.click("#close-settings")
        page.fill("#text", "Hi there")
        expect(page.locator("#ahead-text")).to_contain_text("Not computed ahead: reasoning_effort")
        page.focus("#text")
        page.keyboard.press("Enter")
        answered(page, "hello")
        expect(page.locator(".meta .prompt dd")).to_contain_text("prompt tokens")
        assert "<|im_start|>user\nHi there<|im_end|>" in playbook.prompts[-1]


def test_the_keyboard_is_enough(page: Page) -> None:
    page.locator("#to-chat").focus()
    page.keyboard.press("/")
    expect(page.locator("#text")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answered(page, "hello")
    assert page.locator(".typed").inner_text() == "one\ntwo"
    page.keyboard.press("ArrowUp")
    expect(page.locator(".editor textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".editor")).to_have_count(0)
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#to-settings")
    page.click("#to-settings")
    page.click("#to-settings")
    nameless = page.evaluate("""[...document.querySelectorAll('button, input, textarea, select, a, summary')]
        .filter((part) => part.offsetParent)
        .filter((part) => !(part.ariaLabel || part.textContent.trim() || part.labels?.length))
        .map((part) => part.outerHTML)""")
    assert nameless == []


def test_models_are_chosen_by_name(page: Page, stage: Served) -> None:
    with page.expect_request("**/v1/chat/completions") as sent:
        page.select_option("#model", "<b>other")
        say(page, "Who?")
    answered(page, "hello")
    assert json.loads(sent.value.post_data or "")["model"] == "<b>other"
    page.evaluate("localStorage.setItem('streamserve.settings', '{\"model\": \"gone\"}')")
    page.reload()
    page.click("#new")
    say(page, "Who is left?")
    answered(page, "hello")


def test_the_fleet_in_numbers_and_graphs(page: Page, stage: Served) -> None:
    page.click("#to-fleet")
    workers = page.locator(".worker")
    expect(workers).to_have_count(2)
    expect(workers.first).to_contain_text("prefill-0ready")
    expect(workers.first).to_contain_text("120 of 1,000 blocks")
    expect(workers.last).to_contain_text("64.0 %")
    expect(workers.first).to_contain_text("on red")
    machines = page.locator("#machine-rows tr")
    expect(machines).to_have_count(2)
    expect(machines.first).to_have_text("red1 of 2prefill-075 s0.2 s")
    expect(page.locator("#transfers")).to_contain_text("7 KV transfers")
    expect(page.locator("#decisions tr")).to_contain_text("prefill-0 → decode-0 0.87")
    stage.post("/v1/chat/completions", messages=[{"role": "user", "content": "count"}])
    generated = page.locator(".chart", has_text="Generated")
    expect(generated.locator("path.line")).to_have_attribute("d", re.compile("M.*L"), timeout=10_000)
    expect(generated.locator("svg")).to_have_attribute(
        "aria-label", re.compile(r"at most \d*[1-9]\d*"), timeout=10_000
    )
    shown = {chart.locator("h3").inner_text(): chart for chart in page.locator(".chart:visible").all()}
    assert {"Time to first token", "KV cache in use", "Draft tokens accepted", "Requests"} <= set(shown)
    expect(shown["KV cache in use"].locator("output")).to_have_text("50 %")
    expect(shown["Requests"].locator("output")).to_have_text("3 / 4")
    assert {"100", "50", "0", "now"} <= set(shown["KV cache in use"].locator(".tick").all_text_contents())
    page.reload()
    expect(workers).to_have_count(2)  # the view is part of the address
    page.go_back()


def test_samples_are_taken_gently(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url) if "/assets/" not in sent.url else None)
    page.wait_for_timeout(1000)
    assert len(asked) <= 1
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    asked.clear()
    page.evaluate("location.hash = 'fleet'")
    page.wait_for_timeout(500)
    assert asked == []


def test_a_theme_is_chosen_or_the_system_s(page: Page) -> None:
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(20, 22, 24)'"
    page.emulate_media(color_scheme="light")
    page.select_option("#theme", "dark")
    assert page.evaluate(dark)
    page.reload()
    assert page.evaluate(dark)
    page.select_option("#theme", "light")
    page.emulate_media(color_scheme="dark")
    assert not page.evaluate(dark)
    page.select_option("#theme", "")
    assert page.evaluate(dark)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens(page: Page, stage: Served, scheme: Any) -> None:
    page.set_viewport_size(NARROW)
    page.emulate_media(color_scheme=scheme)
    dark = page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] < 100"
    )
    assert dark == (scheme == "dark")
    drop(page, ("a-name-without-any-space-" * 6 + ".txt", "x"))
    say(page, "markdown " + "long" * 60)
    answered(page, "quoted")
    no_sideways_scroll(page)
    expect(page.locator("#side")).to_be_hidden()
    page.click("#to-side")
    expect(page.locator("#side")).to_be_visible()
    page.click("#to-fleet")
    expect(page.locator("#side")).to_be_hidden()
    expect(page.locator(".worker")).to_have_count(2)
    no_sideways_scroll(page)
    page.goto(stage.url + "/docs")
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    no_sideways_scroll(page)


def test_the_reference_has_contents_and_examples_to_try(page: Page, stage: Served) -> None:
    page.click("#to-docs")
    expect(page.locator("#contents a")).not_to_have_count(0)
    routes = stage.http.get("/openapi.json").json()["paths"]
    assert page.locator("#contents a").count() == sum(map(len, routes.values()))
    page.locator("#contents a", has_text="/v1/chat/completions").click()
    route = page.locator(".route", has=page.locator("code", has_text="/v1/chat/completions"))
    expect(route.locator("h3")).to_be_in_viewport()
    expect(route.locator(".code pre")).to_contain_text(f"curl {stage.url}/v1/chat/completions -d")
    route.get_by_text("Try it").click()
    route.get_by_text("Send POST").click()
    expect(route.locator("output")).to_contain_text("200 OK")
    expect(route.locator(".reply")).to_contain_text('"content": "hello"')
    body = route.get_by_label("Body")
    body.fill(body.input_value().replace('"max_tokens"', '"stream": true, "max_tokens"'))
    route.get_by_text("Send POST").click()
    expect(route.locator(".reply")).to_contain_text("data: [DONE]")


def test_the_reference_has_the_frame_of_the_page(page: Page) -> None:
    side = "[...document.querySelectorAll('#side, .views, .views a, #bar')].map((part) => {"
    side += "const box = part.getBoundingClientRect();"
    side += "return [part.id, box.x, box.y, box.width]; })"
    page.select_option("#theme", "dark")
    page.wait_for_timeout(300)
    shown = page.evaluate(side)
    page.click("#to-docs")
    expect(page.locator("#to-docs")).to_have_attribute("aria-current", "page")
    expect(page.locator("#theme")).to_have_value("dark")
    page.wait_for_timeout(300)
    for there, here in zip(shown[1:], page.evaluate(side)[1:], strict=True):
        assert here[1:4] == there[1:4], here[0]
    page.click("#to-fleet")
    expect(page.locator(".worker")).to_have_count(2)


def test_settings_show_the_defaults_of_the_model(browser: Browser, actor: ScriptedGenerator) -> None:
    with (
        scripted(actor, ApiSettings(default_sampling={"temperature": 0.6, "top_k": 20})) as server,
        opened(browser, server) as page,
    ):
        page.click("#to-settings")
        for name, value in (("temperature", "0.6"), ("top_p", "1"), ("top_k", "20"), ("seed", "random")):
            expect(page.locator(f"#setting-{name}")).to_have_attribute("placeholder", value)
        expect(page.locator("#settings")).not_to_contain_text("default")


def test_it_asks_for_the_key_and_keeps_it_to_itself(browser: Browser, actor: ScriptedGenerator) -> None:
    key = "key-of-the-page"
    with scripted(actor, ApiSettings(api_key=(digest(key),))) as server:
        page = browser.new_context().new_page()
        page.goto(server.url)
        expect(page.locator("#key")).to_be_focused()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_timeout(200)
        expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", key)
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        say(page, "hi")
        answered(page, "hello")
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert key not in kept
        assert key not in page.url
        page.reload()
        expect(page.locator("#key-form")).to_be_visible()
        assert page.input_value("#key") == ""
        page.context.close()


def test_failures_are_told(browser: Browser, stage: Served) -> None:
    with opened(browser, stage, tolerated="net::ERR_FAILED") as page:
        page.route("**/v1/chat/completions", lambda route: route.abort())
        say(page, "hi")
        expect(page.locator(".message .problem").last).to_have_text("The server does not respond.")
        page.unroute("**/v1/chat/completions")
        page.locator(".message").last.get_by_label("Regenerate").click()
        answered(page, "hello")
