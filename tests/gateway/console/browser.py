"""The console's own rules as its tests need them: a signed-in HTTP client, and a headless browser."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
from playwright.async_api import Browser, Page, async_playwright

from tests.gateway.harness import Site

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
AXE = Path(__file__).parent / "assets" / "axe.min.js"
PAGES = ("/console", "/console/tenants", "/console/workers", "/console/requests", "/console/policies")


def require_chromium() -> str:
    """The browser's path; a clear failure where it is missing, because these tests are never left out."""
    assert Path(CHROMIUM).exists(), (
        f"{CHROMIUM} is missing: apt-get install chromium (Debian), then run these tests again"
    )
    return CHROMIUM


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A headless browser."""
    path = require_chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            await browser.close()


class Tab:
    """A page that notes what went wrong in it: script errors, refusals of the content security policy, dialogs."""

    def __init__(self, page: Page, base: str) -> None:
        self.page = page
        self.base = base
        self.problems: list[str] = []
        self.requested: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", lambda message: self._heard(message))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: self.requested.append(request.url))

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    async def open(self, path: str) -> None:
        """Go there and wait until it is live."""
        await self.page.goto(self.base + path)
        await self.page.locator('#line[data-state="live"]').wait_for(timeout=30_000)

    async def axe(self) -> list[str]:
        """Serious and critical violations that axe-core finds, one line each."""
        # Evaluated by the debugger, which the page's own policy does not bind.
        await self.page.evaluate(AXE.read_text() + "; true")
        found = await self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{violation['id']}: {node['target']} {node['failureSummary']}"
            for violation in found["violations"]
            if violation["impact"] in ("serious", "critical")
            for node in violation["nodes"]
        ]


@contextlib.asynccontextmanager
async def tab(browser: Browser, site: Site, **options: Any) -> AsyncIterator[Tab]:
    """A new browser profile with one page; nothing may have gone wrong in it."""
    context = await browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
    try:
        opened = Tab(await context.new_page(), site.admin_url)
        yield opened
        assert opened.problems == []
        assert [url for url in opened.requested if not url.startswith(site.admin_url)] == []
    finally:
        await context.close()


class Visitor:
    """An HTTP client that behaves like a browser with the console's cookie."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.origin = site.admin_url
        self.http = httpx.AsyncClient(base_url=site.admin_url, timeout=30)
        self.csrf = ""

    async def get(self, path: str) -> httpx.Response:
        """GET; notes the page's CSRF token."""
        answer = await self.http.get(path)
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', answer.text)
        self.csrf = found.group(1) if found else self.csrf
        return answer

    async def post(self, path: str, **fields: str) -> httpx.Response:
        """POST the form with token and origin."""
        return await self.raw(path, {"csrf": self.csrf, **fields}, {"origin": self.origin})

    async def raw(self, path: str, fields: dict[str, str], headers: dict[str, str]) -> httpx.Response:
        """POST as told."""
        return await self.http.post(path, data=fields, headers=headers)


@contextlib.asynccontextmanager
async def visitor(site: Site) -> AsyncIterator[Visitor]:
    """A visitor who has seen a page with forms."""
    made = Visitor(site)
    try:
        await made.get("/console/tenants")
        yield made
    finally:
        await made.http.aclose()


def text(html: str) -> str:
    """What a person reads: tags gone, entities resolved, spaces collapsed."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


async def messages(site: Site, page: str, count: int) -> list[tuple[str, str]]:
    """The first ``count`` (event, data) of a page's stream."""
    got: list[tuple[str, str]] = []
    name, data = "", []
    async with site.admin.stream("GET", f"/console/live/{page}") as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                data.append(value)
            elif not line and data:
                got.append((name, "\n".join(data)))
                name, data = "", []
                if len(got) == count:
                    break
    return got
