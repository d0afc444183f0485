"""The console in a real browser: live, by keyboard, in both themes, on a phone, without a violation of axe-core.

Every tab fails its test for a script error, a refusal of its content security policy, or a request to anywhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from tests.gateway.conftest import Start
from tests.gateway.console.browser import PAGES, chromium, tab
from tests.gateway.harness import MODEL, Site, pool, tickets, token, until
from tests.gateway.test_adapters import ROOM, write
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = "<img src=x onerror=alert(1)>\"'><script>alert(2)</script>"
expect.set_options(timeout=30_000)  # a busy machine is not a fault of the pages

SETTINGS = {
    "tenants": [
        {"id": "alpha", "weight": 3, "limits": {"requests_per_minute": 100, "concurrent": 64}},
        {"id": "beta", "class": "batch"},
    ],
    "tenant_defaults": {},
    "models": [pool(blocks=8192)],  # room for all: a preempted request would stand still
}
ECHO = Echo(step_s=0.02)
ROLES = ("prefill", "decode")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy(shared: Site) -> AsyncIterator[Site]:
    """The gateway with work from three tenants, one of them with a hostile name, for the whole module."""

    async def ask(tenant: str, name: str) -> None:
        """One caller: asks again whenever it has its answer."""
        headers = {"authorization": f"Bearer {token(tenant)}", "x-request-id": name}
        body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 4000}
        while True:
            answer = await shared.http.post("/v1/completions", json=body, headers=headers, timeout=300)
            assert answer.status_code in (200, 403), answer.text

    tenants = ("alpha", "beta", HOSTILE, *["alpha"] * 10)
    calls = [asyncio.create_task(ask(tenant, f"call-{n}")) for n, tenant in enumerate(tenants)]
    await until(lambda: len(tickets(shared)) == len(calls), "all are here")
    await until(lambda: shared.gateway.parts.history.latest.standings, "a sample knows of it")
    try:
        yield shared
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def running_job(site: Site) -> str:
    """The id of one of alpha's requests that produces output."""

    def found() -> list[str]:
        return [t.job.id for t in tickets(site) if t.first_token_at and t.job.tenant == "alpha"]

    await until(found, "one of alpha's requests runs")
    return found()[0]


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_nothing_serious(browser: Browser, busy: Site, theme: str) -> None:
    """Every page, with its forms, at a desk and on a phone."""
    for width in (1280, 390):
        options = {"color_scheme": theme, "viewport": {"width": width, "height": 844}}
        async with tab(browser, busy, **options) as opened:
            for path in (*PAGES, "/console/policies?kind=scheduling"):
                await opened.open(path)
                assert await opened.axe() == [], (path, width)
                overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert await opened.page.evaluate(overflow) <= 0, f"{path} is wider than {width} px"


async def test_axe_finds_nothing_serious_in_what_only_some_workers_show(
    browser: Browser, start: Start, tmp_path: Path
) -> None:
    """Roles, transfers, adapters."""
    engine = {"blocks": 256, "max_running": 8, "adapters": [{"name": "law", "source": write(tmp_path, "law")}], **ROOM}
    pools = [{"name": role, "launch": {"use": "echo"}, "engine": {**engine, "role": role}} for role in ROLES]
    async with start({"models": [{**pool(), "pools": pools}]}) as site:
        await until(lambda: len(site.dispatcher.workers) == len(ROLES), "both workers are there")
        assert (await site.complete(prompt=[5, 6, 7, 8] * 50)).status_code == 200
        for theme in ("light", "dark"):
            async with tab(browser, site, color_scheme=theme, viewport={"width": 390, "height": 844}) as opened:
                await opened.open("/console/workers")
                for words in (*ROLES, "Prompts from elsewhere", "law"):
                    await expect(opened.page.get_by_text(words).first).to_be_visible()
                assert await opened.axe() == []


async def test_the_overview_lives(browser: Browser, busy: Site) -> None:
    """Figures and charts go on without a reload; every chart has drawn something."""
    async with tab(browser, busy) as opened:
        await opened.open("/console")
        await expect(opened.page.locator("#share-alpha")).to_contain_text("%")
        await expect(opened.page.locator("[data-chart] canvas")).to_have_count(6)
        drawn = """() => [...document.querySelectorAll('[data-chart] canvas')].map(canvas => {
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return data.some(value => value !== 0);
        })"""
        assert all(await opened.page.evaluate(drawn))
        clock = opened.page.locator("[data-chart=throughput] .u-legend .u-value").first
        await expect(clock).not_to_have_text("–")
        before = await clock.text_content()
        await expect(clock).not_to_have_text(before or "", timeout=30_000)


async def test_focus_and_open_parts_survive_the_updates(browser: Browser, busy: Site) -> None:
    """Rows are morphed, not replaced: whoever is about to press a button still is a second later."""
    async with tab(browser, busy) as opened:
        await opened.open("/console/requests")
        job = await running_job(busy)
        button = opened.page.locator(f"#cancel-{job}")
        await button.focus()
        output = opened.page.locator(f"#job-{job} td[data-label=Output]")
        before = await output.text_content()
        await expect(output).not_to_have_text(before or "", timeout=30_000)
        await expect(button).to_be_focused()


async def test_ending_a_request_by_keyboard(browser: Browser, busy: Site) -> None:
    """Enter asks, Escape keeps, Enter on the other button ends it."""
    async with tab(browser, busy) as opened:
        await opened.open("/console/requests")
        job = await running_job(busy)
        dialog = opened.page.locator("#confirm")
        await opened.page.locator(f"#cancel-{job}").focus()
        await opened.page.keyboard.press("Enter")
        await expect(dialog).to_be_visible()
        await expect(dialog).to_contain_text(f"End request {job} of alpha?")
        await opened.page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()
        assert any(t.job.id == job for t in tickets(busy))
        await opened.page.keyboard.press("Enter")
        await expect(dialog.get_by_role("button", name="Keep")).to_be_focused()
        await opened.page.keyboard.press("Tab")
        await opened.page.keyboard.press("Enter")
        await expect(opened.page.locator("#result")).to_contain_text(f"Request {job} ended")
        assert all(t.job.id != job for t in tickets(busy))
        await expect(opened.page.locator(f"#job-{job}")).to_have_count(0, timeout=30_000)


async def test_every_control_is_reached_by_tab(browser: Browser, busy: Site) -> None:
    async with tab(browser, busy) as opened:
        await opened.open("/console/policies?kind=scheduling")
        wanted = await opened.page.evaluate(
            "document.querySelectorAll('a[href], button:not(dialog *), select, textarea, summary').length"
        )
        await opened.page.keyboard.press("Tab")
        assert await opened.page.evaluate("document.activeElement.textContent") == "Skip to content"
        reached = set()
        for _ in range(wanted + 5):
            reached.add(
                await opened.page.evaluate(
                    "(e => e === document.body ? '' : e.tagName + (e.id || e.getAttribute('href') || e.textContent))"
                    "(document.activeElement)"
                )
            )
            await opened.page.keyboard.press("Tab")
        assert {"BUTTONtheme", "SELECTuse", "TEXTAREAwith", "BUTTONreload", "BUTTONCheck", "BUTTONSwap"} <= reached


async def test_a_purge_shows_its_receipt(browser: Browser, busy: Site) -> None:
    async with tab(browser, busy) as opened:
        await opened.open("/console/tenants")
        await opened.page.get_by_role("button", name="Purge cache of beta").click()
        await opened.page.get_by_role("button", name="Go ahead").click()
        result = opened.page.locator("#result")
        await expect(result).to_contain_text("Cache of beta")
        await result.locator("summary").click()
        await expect(result.locator("pre")).to_contain_text('"signature"')
        assert await opened.axe() == []


async def test_policies_are_checked_and_swapped(browser: Browser, busy: Site) -> None:
    async with tab(browser, busy) as opened:
        await opened.open("/console/policies")
        await opened.page.get_by_role("link", name="Change scheduling").click()
        await opened.page.locator('#line[data-state="live"]').wait_for()
        generation = busy.gateway.parts.runtime.current.generation
        await opened.page.locator("#use").select_option("vtc")
        await opened.page.locator("#with").fill("output_cost: -1\nspeed: fast")
        # The server refuses with 422, which the browser's console calls an error; htmx shows what it says.
        await opened.page.get_by_role("button", name="Check").click()
        result = opened.page.locator("#result")
        await expect(result).to_contain_text("with.output_cost")
        await expect(result).to_contain_text("with.speed")
        assert [problem for problem in opened.problems if "422" not in problem] == []
        opened.problems.clear()
        assert busy.gateway.parts.runtime.current.generation == generation
        await expect(opened.page.locator("#with")).to_have_value("output_cost: -1\nspeed: fast")
        await opened.page.locator("#with").fill("output_cost: 3")
        await opened.page.get_by_role("button", name="Swap").click()
        await opened.page.get_by_role("button", name="Go ahead").click()
        await expect(result).to_contain_text("scheduling is now vtc")
        await expect(opened.page.locator("#kind-scheduling")).to_contain_text("output_cost: 3", timeout=30_000)
        assert busy.gateway.parts.runtime.current.generation == generation + 1


async def test_a_shadow_run_is_watched_and_stopped(browser: Browser, busy: Site) -> None:
    async with tab(browser, busy) as opened:
        await opened.open("/console/policies?kind=scheduling")
        await opened.page.locator("#use").select_option("wfq")
        await opened.page.locator("#with").fill("")
        await opened.page.get_by_label("Or watch first for").fill("600")
        await opened.page.get_by_role("button", name="Try in the shadow").click()
        await opened.page.get_by_role("button", name="Go ahead").click()
        await expect(opened.page.locator("#result")).to_contain_text("wfq watches every queue")
        trial = opened.page.locator("#trial")
        await expect(trial).to_contain_text("Shadow run of wfq")
        await expect(trial).to_contain_text("running")
        assert await opened.axe() == []
        await opened.page.get_by_role("button", name="Stop watching").click()
        await expect(trial).to_contain_text("cancelled")
        assert busy.gateway.parts.runtime.trial is not None
        assert not busy.gateway.parts.runtime.trial.running


async def test_hostile_names_stay_text_in_the_browser(browser: Browser, busy: Site) -> None:
    """A dialog or a script error would be noted by the tab; the name is there to be read."""
    async with tab(browser, busy) as opened:
        for path in ("/console/tenants", "/console/workers", "/console/requests"):
            await opened.open(path)
            await expect(opened.page.locator("#live")).to_contain_text(HOSTILE)
            assert await opened.page.locator("#live img, #live script").count() == 0
        await opened.open("/console/tenants")
        await opened.page.get_by_role("button", name=f"Purge cache of {HOSTILE}").click()
        await expect(opened.page.locator("#confirm")).to_contain_text(HOSTILE)
        await opened.page.get_by_role("button", name="Go ahead").click()
        await expect(opened.page.locator("#result")).to_contain_text(HOSTILE)


async def test_the_theme_is_kept(browser: Browser, busy: Site) -> None:
    async with tab(browser, busy, color_scheme="light") as opened:
        await opened.open("/console")
        ground = "getComputedStyle(document.body).backgroundColor"
        light = await opened.page.evaluate(ground)
        button = opened.page.locator("#theme")
        await button.click()
        await expect(button).to_have_attribute("aria-label", "Colours: light")
        await button.click()
        await expect(button).to_have_attribute("aria-label", "Colours: dark")
        dark = await opened.page.evaluate(ground)
        assert dark != light
        await opened.open("/console/workers")
        assert await opened.page.evaluate(ground) == dark


async def test_it_works_without_scripts(browser: Browser, busy: Site) -> None:
    """Not live, but readable, and its forms work."""
    async with tab(browser, busy, java_script_enabled=False) as opened:
        await opened.page.goto(f"{busy.admin_url}/console/tenants")
        await opened.page.get_by_role("button", name="Purge cache of alpha").click()
        await expect(opened.page.locator("main")).to_contain_text("Cache of alpha")
        await opened.page.get_by_role("link", name="Back to the console").click()
        await expect(opened.page).to_have_url(f"{busy.admin_url}/console/tenants")


async def test_signing_in_and_out(browser: Browser, start: Start) -> None:
    async with (
        start(env={"FOREBAY_ADMIN_TOKEN": "a token"}, ready=False) as site,
        tab(browser, site) as opened,
        tab(browser, site) as second,
    ):
        await opened.page.goto(f"{site.admin_url}/console/requests")
        for theme in ("dark", "light"):
            await opened.page.emulate_media(color_scheme=theme)
            assert await opened.axe() == [], theme
        await opened.page.get_by_label("Admin token").fill("wrong")
        await opened.page.keyboard.press("Enter")
        await expect(opened.page.get_by_role("alert")).to_have_text("That is not the admin token.")
        assert [problem for problem in opened.problems if "401" not in problem] == []
        opened.problems.clear()
        await opened.page.get_by_label("Admin token").fill("a token")
        await opened.page.keyboard.press("Enter")
        await opened.page.locator('#line[data-state="live"]').wait_for()

        # Another profile has no part in it; a tab of this one loses its stream with the session.
        await second.page.goto(f"{site.admin_url}/console")
        await expect(second.page).to_have_url(f"{site.admin_url}/console/login")
        beside = await opened.page.context.new_page()
        await beside.goto(f"{site.admin_url}/console/workers")
        await beside.locator('#line[data-state="live"]').wait_for()
        await opened.page.get_by_role("button", name="Sign out").click()
        await expect(opened.page).to_have_url(f"{site.admin_url}/console/login")
        await expect(beside).to_have_url(f"{site.admin_url}/console/login", timeout=30_000)
