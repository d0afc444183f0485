"""``forebay top``: figures of a real gateway, and names that cannot act on a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pytest
from rich.console import Console

from gateway.cli.top import BAR, bar, quantiles, screen
from tests.arch.source import ROOT
from tests.gateway.conftest import Start
from tests.gateway.harness import pool, tickets, until
from workers.plain import escaped
from workers.testing import Echo


async def forebay_top(*words: str, **environment: str) -> tuple[int, str, str]:
    """Run ``forebay top`` in a process of its own, beside the gateway in this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.cli",
        "top",
        *words,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "140", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_one_look_at_a_gateway(start: Start) -> None:
    hostile = {**pool(), "name": "evil\u202e[red]model"}
    changes = {"models": [pool(), hostile]}
    async with start(changes, echo=Echo(step_s=0.02), env={"FOREBAY_ADMIN_TOKEN": "t"}) as site:
        call = asyncio.create_task(site.complete(max_tokens=3000))
        await until(lambda: any(ticket.first_token_at for ticket in tickets(site)), "it runs")
        code, out, err = await forebay_top("--once", "--url", site.admin_url, FOREBAY_ADMIN_TOKEN="t")
        assert (code, err) == (0, "")
        for word in ("ready", "2 of 2 workers", "alpha", "beta", "evil\\u202e[red]model", "echo/local-0", "1/8"):
            assert word in out
        assert "\u202e" not in out
        code, out, err = await forebay_top("--once", "--url", site.admin_url, FOREBAY_ADMIN_TOKEN="wrong")
        assert (code, out, "admin token" in err) == (1, "", True)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def test_no_gateway_is_one_message() -> None:
    code, out, err = await forebay_top("--once", "--url", "http://127.0.0.1:9")
    assert (code, out) == (1, "")
    assert "No gateway answers at http://127.0.0.1:9" in err
    assert "Traceback" not in err


def rendered(overview: dict[str, Any], width: int, problem: str = "") -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(screen(overview, problem, width))
    text = console.export_text()
    console.file.close()
    return text


def overview(**status: Any) -> dict[str, Any]:
    tenant = {"id": "search", "weight": 2.0, "share": 0.5, "entitled": 0.25, "active": True, "running": 3, "queued": 1}
    worker = {"name": "m/local-0", "state": "ready", "set_aside": True, "stale": False, "running": 3, "max_running": 8}
    return {
        "status": {"ready": True, "missing": [], "stalled": [], "workers": 1, "workers_ready": 1, **status},
        "now": {
            "fairness": None,
            "tokens_per_s": 1234.5,
            "running": 3,
            "queued": 1,
            "first_token": {"p50": 0.05, "p95": 1.5, "p99": 2},
            "between_tokens": None,
            "shed": 1,
            "throttled": 22,
        },
        "tenants": [
            {**tenant, "queued_tokens": 12345, "refused": 7},
            {**tenant, "id": "quiet", "active": False, "queued_tokens": 0, "refused": 0},
        ],
        "more_tenants": 4,
        "workers": [
            {
                **worker,
                "waiting": 1,
                "used_blocks": 30,
                "cached_blocks": 400,
                "free_blocks": 3,
                "hit_rate": None,
                "preemptions": 9,
                "step_ms": 12.34,
            }
        ],
    }


@pytest.mark.parametrize("width", [80, 100, 200])
def test_nothing_is_cut_off_at_any_width(width: int) -> None:
    text = rendered(overview(), width)
    for word in (
        "search",
        "50.0%",
        "25.0%",
        "quiet",
        "and 4 more",
        "m/local-0",
        "set aside",
        "3/8",
        "12.3 ms",
        "1.50 s",
    ):
        assert word in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert ("12,345" in text) == (width >= 100)


@pytest.mark.parametrize("width", [80, 200])
def test_what_only_some_workers_have(width: int) -> None:
    told = overview()
    [worker] = told["workers"]
    assert "guesses" not in rendered(told, width)
    tiers = [{"name": "host", "bytes": 3 << 30, "up": True}, {"name": "disk", "bytes": 5 << 20, "up": False}]
    worker |= {
        "acceptance": 0.625,
        "tiers": tiers,
        "transfers": {"ok": 1200, "failed": 3},
        "adapters": ["sql", "\x1b[2Jlegal"],
    }
    text = " ".join(rendered(told, width).split())
    for words in (
        "guesses right 62.5%", "below the device host 3,072 MiB, disk 5 MiB (not written to)",
        "prompts from elsewhere 1,200, 3 failed", "adapters sql, \\x1b[2Jlegal",
    ):  # fmt: skip
        assert words in text
    assert "…" not in text


def test_it_says_what_is_wrong() -> None:
    assert "stalled: m" in rendered(overview(stalled=["m"]), 120)
    assert "not ready: no worker" in rendered(overview(ready=False, missing=["no worker"]), 120)
    assert "figures are old: gone" in rendered(overview(), 120, "gone")


def test_the_bar_fills_and_marks() -> None:
    assert bar(0.5, 1.0).plain == "█" * (BAR // 2) + "·" * (BAR // 2 - 1) + "│"
    assert bar(0.0, 0.0).plain == "│" + "·" * (BAR - 1)
    assert len(bar(1.7, 2.0).plain) == BAR
    assert quantiles(None) == "–"
    assert escaped("a\x00\x1b\u202eb") == "a\\x00\\x1b\\u202eb"
