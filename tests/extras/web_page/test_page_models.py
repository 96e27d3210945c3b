"""The page shows the states of models that are loaded on demand, and unloads them with an admin key. Skipped
on machines without a Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect

from streamserve.api.app import OnDemand, create_app_on_demand
from streamserve.api.generator import Generator
from streamserve.api.settings import ApiSettings
from streamserve.protocol.keys import digest
from tests.api.fake_pool import FakePool, FakeState
from tests.api.serving import ScriptedGenerator, Served, served
from tests.extras.web_page.page import NARROW, launched, no_sideways_scroll, opened

KEY, ADMIN = "the-key-of-users", "the-key-of-admins"
LONG = "a-model-with-a-name-that-is-longer-than-the-bar-of-a-telephone"
MENU = "#unload > summary"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as chromium:
        yield chromium


@pytest.fixture
def pool() -> FakePool:
    pool = FakePool({name: FakeState(size=1_234_000_000) for name in ("actor", LONG)})
    pool.models["actor"].state = "loaded"
    return pool


@contextmanager
def stage(generator: ScriptedGenerator, pool: FakePool, settings: ApiSettings) -> Iterator[Served]:
    """Serve the models of the pool."""

    async def start() -> Generator:
        return generator

    models = {name: OnDemand(generator.replaced(served_names=(name,)), settings, 64) for name in pool.models}
    with served(start, make_app=lambda _llm, _settings: create_app_on_demand(models, pool)) as server:
        yield server


def unload(page: Page, key: str = "") -> None:
    if key:
        page.fill("#admin-key", key)
    page.get_by_role("button", name="Unload", exact=True).click()


def test_a_model_is_unloaded_with_an_admin_key(
    browser: Browser, generator: ScriptedGenerator, pool: FakePool
) -> None:
    with (
        stage(generator, pool, ApiSettings(admin_key=(digest(ADMIN),))) as server,
        opened(browser, server, tolerated="Failed to load resource") as page,
    ):
        expect(page.locator("#model option")).to_have_text(["actor", f"{LONG} (not loaded)"])
        page.click(MENU)
        expect(page.locator("#unload-text")).to_contain_text("actor is loaded and takes 1.2 GB.")
        unload(page, "a wrong key")
        expect(page.locator("#unload-problem")).to_have_text("This needs an admin key of the server.")
        expect(page.locator("#key-form")).to_be_hidden()
        pool.users["actor"] = 1
        unload(page, ADMIN)
        expect(page.locator("#unload-problem")).to_have_text("in use")
        assert pool.models["actor"].state == "loaded"
        pool.users["actor"] = 0
        unload(page, ADMIN)
        expect(page.locator("#unload")).to_be_hidden()
        expect(page.locator("#notice")).to_contain_text("actor is unloaded.")
        expect(page.locator("#model option").first).to_have_text("actor (not loaded)")
        assert pool.models["actor"].state == "not loaded"
        assert ADMIN not in page.evaluate(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
        )

        page.select_option("#model", LONG)
        pool.models[LONG].state = "loaded"  # by another client: the page follows
        expect(page.locator("#model option").last).to_have_text(LONG)
        page.set_viewport_size(NARROW)
        page.click(MENU)
        expect(page.locator("#unload-text")).to_contain_text(f"{LONG} is loaded")
        for part in (MENU, "#unload-form", "#to-settings"):
            box = page.locator(part).bounding_box()
            assert box
            assert 0 <= box["x"] <= box["x"] + box["width"] <= NARROW["width"], part
        no_sideways_scroll(page)
        page.keyboard.press("Escape")
        expect(page.locator("#unload-form")).to_be_hidden()


def test_the_key_of_the_page_is_enough_if_it_may_do_it(
    browser: Browser, generator: ScriptedGenerator, pool: FakePool
) -> None:
    settings = ApiSettings(api_key=(digest(KEY), digest(ADMIN)), admin_key=(digest(ADMIN),))
    with stage(generator, pool, settings) as server:
        for key, asked in ((KEY, True), (ADMIN, False)):
            page = browser.new_context().new_page()
            page.goto(server.url)
            page.fill("#key", key)
            page.keyboard.press("Enter")
            page.click(MENU)
            expect(page.locator("#admin-key")).to_be_hidden()
            unload(page)
            if asked:
                expect(page.locator("#unload-problem")).to_have_text("This needs an admin key of the server.")
                expect(page.locator("#admin-key")).to_be_visible()
                assert pool.models["actor"].state == "loaded"
            else:
                expect(page.locator("#unload")).to_be_hidden()
                assert pool.models["actor"].state == "not loaded"
            page.context.close()


@pytest.mark.parametrize("state", ["not loaded", "loading", "loaded"])
def test_without_admin_keys_nothing_is_offered(
    browser: Browser, generator: ScriptedGenerator, pool: FakePool, state: str
) -> None:
    pool.models["actor"].state = state
    with stage(generator, pool, ApiSettings()) as server, opened(browser, server) as page:
        shown = "actor" if state == "loaded" else f"actor ({state})"
        expect(page.locator("#model option").first).to_have_text(shown)
        expect(page.locator("#unload")).to_be_hidden()
