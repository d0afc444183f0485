"""The console of a real ``forebay serve`` with the real model, in a real browser."""

from __future__ import annotations

import threading
import time

from playwright.sync_api import Page, expect, sync_playwright

from tests.e2e.harness import MODEL, Server
from tests.gateway.console.browser import FLAGS, PAGES, require_chromium

CANARY = "canary-2718-keep-this-to-yourself"
LIVE = '#line[data-state="live"]'


def everything(page: Page, server: Server) -> str:
    """The text and the source of every page, once it is live."""
    seen = []
    for path in PAGES:
        page.goto(server.info["admin_url"] + path)
        page.locator(LIVE).wait_for(timeout=30_000)
        seen.append(page.content())
    return "".join(seen)


def test_an_operator_watches_a_request_and_never_reads_it(server: Server) -> None:
    """It shows up while it runs and among the slowest when it is over; its text is on no page, before or after."""
    answers = []
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{CANARY}. Say this again and count to a hundred."}],
        "max_tokens": 600,
        "ignore_eos": True,  # long enough to be seen on a fast machine
        "temperature": 0,
    }
    asking = threading.Thread(target=lambda: answers.append(server.post(body, "search", **{"x-request-id": "watched"})))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=require_chromium(), args=FLAGS)
        try:
            page = browser.new_page()
            problems: list[str] = []
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(server.info["admin_url"] + "/console/requests")
            page.locator(LIVE).wait_for(timeout=30_000)
            asking.start()
            running = page.locator("section[aria-labelledby=running]")
            expect(running).to_contain_text("search", timeout=30_000)
            during = page.content()
            asking.join(60)
            assert answers[0].status_code == 200
            expect(page.locator("section[aria-labelledby=slowest]")).to_contain_text("watched", timeout=30_000)
            time.sleep(1.1)  # the next sample knows of it
            after = everything(page, server)
            page.goto(server.info["admin_url"] + "/console")
            expect(page.locator("#share-search")).to_contain_text("%", timeout=30_000)
            assert problems == []
        finally:
            browser.close()
    said = answers[0].json()["choices"][0]["message"]["content"]
    assert len(said) > 20
    for text in (CANARY, said[:40]):
        assert text not in during + after
