"""Makes the pictures of ``docs/console.md``: ``python -m tests.gateway.console.screenshots [NAME ...]``.

A gateway with two echo workers, four tenants and a minute and a half of traffic; not a test, and not run by one.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import Browser

from gateway.settings import PolicyUse
from tests.arch.source import ROOT
from tests.gateway.console.browser import chromium, tab
from tests.gateway.harness import Site, pool, running
from tests.otlp import OtlpReceiver
from workers.testing import Echo

IMAGES = ROOT / "docs" / "images"
TRAFFIC_S = 90
MAX_BYTES = 200_000
SETTINGS: dict[str, Any] = {
    "policies": {"scheduling": {"use": "vtc", "with": {"input_cost": 1.0, "output_cost": 2.0}}},
    "tenants": [
        {"id": "search", "weight": 4, "limits": {"requests_per_minute": 600, "tokens_per_minute": 200_000}},
        {"id": "assist", "weight": 2, "limits": {"tokens_per_minute": 90_000, "concurrent": 64}},
        {"id": "batch", "weight": 1, "class": "batch", "limits": {"concurrent": 32}},
        {"id": "reports", "weight": 1, "class": "batch"},
    ],
    "telemetry": {"jaeger_ui": "http://127.0.0.1:16686"},
    "models": [pool(2, blocks=512, max_running=8)],
}
CALLERS = {"search": 20, "assist": 9, "batch": 8}
CALM = 20
"""Callers that are left for the picture of the requests, so that all of its tables can be seen."""
SHOTS = (
    ("overview", "", {"color_scheme": "light"}, None),
    ("overview-dark", "", {"color_scheme": "dark"}, None),
    ("tenants", "/tenants", {"color_scheme": "light"}, None),
    ("workers", "/workers", {"color_scheme": "dark"}, None),
    ("policies", "/policies?kind=scheduling", {"color_scheme": "dark"}, None),
    ("phone", "", {"color_scheme": "light", "viewport": {"width": 390, "height": 844}}, 1500),
    ("requests", "/requests", {"color_scheme": "light"}, None),
)


async def ask(site: Site, tenant: str, draw: random.Random) -> None:
    """One caller, for ever; a few of its prompts begin alike."""
    shared = [draw.randrange(3, 250) for _ in range(64)]
    while True:
        prompt = [
            *(shared if draw.random() < 0.4 else []),
            *(draw.randrange(3, 250) for _ in range(draw.randrange(20, 120))),
        ]
        await site.complete(tenant, prompt=prompt, max_tokens=draw.randrange(20, 120))
        await asyncio.sleep(draw.random() / 10)


async def shoot(site: Site, browser: Browser, wanted: Collection[str], callers: list[asyncio.Task[None]]) -> None:
    """All pictures, or those of ``wanted``."""
    IMAGES.mkdir(exist_ok=True)
    for name, path, options, height in SHOTS:
        if wanted and name not in wanted:
            continue
        if name == "requests":
            for caller in callers[::-1][: len(callers) - CALM]:
                caller.cancel()
            await asyncio.sleep(5)
        async with tab(browser, site, **options) as opened:
            await opened.open(f"/console{path}")
            await opened.page.wait_for_timeout(1500)
            width = opened.page.viewport_size["width"] if opened.page.viewport_size else 1280
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height}} if height else {}
            target = IMAGES / f"console-{name}.png"
            await opened.page.screenshot(path=target, full_page=True, **clip)  # type: ignore[arg-type]
            Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)
            assert target.stat().st_size < MAX_BYTES, f"{target}: {target.stat().st_size} bytes"


async def main() -> None:
    """Serve, work, shoot."""
    draw = random.Random(6)
    with OtlpReceiver() as receiver, tempfile.TemporaryDirectory() as folder:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        async with running(Path(folder), SETTINGS, echo=Echo(step_s=0.03), env=env) as site, chromium() as browser:
            names = [who for who, many in CALLERS.items() for _ in range(many)]
            draw.shuffle(names)
            callers = [asyncio.create_task(ask(site, who, draw)) for who in names]
            await asyncio.sleep(TRAFFIC_S - 15)
            await site.gateway.parts.runtime.try_in_shadow(PolicyUse(use="fcfs"), 600)
            await asyncio.sleep(15)
            await shoot(site, browser, sys.argv[1:], callers)
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
