"""A whole gateway that is killed in the middle of its work: every answer that a caller had is in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from policies.quota.ledger import LedgerQuota
from policies.types import TenantId, UsageQuery
from tests.arch.source import ROOT
from tests.gateway.harness import MODEL, token

GATEWAY = """
import asyncio, sys
from pathlib import Path
from tests.gateway.harness import running
from workers.testing import Echo

SETTINGS = {
    "state": {"path": "state"},
    "policies": {"quota": {"use": "ledger"}},
    "tenants": [{"id": "alpha", "limits": {"concurrent": 100, "tokens_per_day": 10**9}}, {"id": "beta"}],
    "prices": {"models": {"echo": {"input": 1, "cached_input": 0.5, "output": 4}}},
}

async def main():
    async with running(Path(sys.argv[1]), SETTINGS, echo=Echo(step_s=0.002)) as site:
        print(site.url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
CALLERS = 8
ANSWERS = (25, 60)
"""So many have come before it is killed."""


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", GATEWAY, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            assert child.stdout is not None
            while not (line := child.stdout.readline()).startswith("http"):
                assert line, "it ended"
            yield child, line.strip()
        finally:
            child.kill()


async def whole(client: httpx.AsyncClient, stream: bool) -> dict[str, Any] | None:
    """The answer's id and usage, if all of it came."""
    body = {"model": MODEL, "prompt": [random.randrange(5, 60) for _ in range(random.randrange(1, 40))]}
    body |= {"max_tokens": random.randrange(1, 30), "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"authorization": f"Bearer {token(random.choice(('alpha', 'beta')), sub='ann')}"}
    answer = await client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    if not stream:
        return dict(answer.json())
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return dict(json.loads(events[-2])) if events[-1] == "[DONE]" else None


async def test_what_callers_were_told_is_in_the_ledger_after_kill_9(tmp_path: Path) -> None:
    """issue 5: kill -9 at any moment loses no settled token, and what was open holds nothing afterwards."""
    answered: dict[str, Any] = {}
    for wanted in ANSWERS:
        before = len(answered)
        with gateway(tmp_path) as (child, url):

            async def call(
                number: int, url: str = url, child: subprocess.Popen[str] = child, most: int = before + wanted
            ) -> None:
                async with httpx.AsyncClient(base_url=url, timeout=30) as client:
                    with contextlib.suppress(httpx.HTTPError):
                        while True:
                            if (answer := await whole(client, bool(number % 2))) is not None:
                                answered[answer["id"].partition("-")[2]] = answer["usage"]
                            if len(answered) >= most:
                                child.send_signal(signal.SIGKILL)

            await asyncio.gather(*map(call, range(CALLERS)))
            assert child.wait(30) == -signal.SIGKILL
        quota = LedgerQuota(tmp_path / "state" / "ledger.db")
        await quota.start()
        assert quota.concurrent(TenantId("alpha")) == 0
        (total,) = await quota.usage(UsageQuery("2000-01-01", "9999-12-31"))
        await quota.close()
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / "ledger.db")) as file:
            assert file.execute("SELECT count(*) FROM open").fetchone() == (0,)
            rows = file.execute(
                "SELECT r.id, s.outcome, s.prompt, s.cached, s.output, s.cost FROM reservations r JOIN settlements s "
                "USING (seq)"
            ).fetchall()
        ran = {name: figures for name, outcome, *figures in rows if outcome == "ran"}
        for name, usage in answered.items():
            prompt, cached, output, _ = ran[name]
            assert (prompt + cached, output) == (usage["prompt_tokens"], usage["completion_tokens"])
        sums = [sum(figures[place] for figures in ran.values()) for place in range(4)]
        assert [total.prompt, total.cached, total.output, total.cost] == sums
        assert total.requests == len(ran)
        assert len(answered) >= before + wanted
