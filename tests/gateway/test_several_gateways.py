"""Two gateways that count in one ledger (gateway A1 with two replicas): a cap of one tenant holds over both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.gateway.harness import BASE, running, until
from workers.testing import Echo

CAPPED: dict[str, Any] = {"tenants": [{"id": "alpha", "limits": {"tokens_per_day": 600}}, {"id": "beta"}]}


async def test_twenty_calls_at_each_of_two_gateways_pass_one_cap(tmp_path: Path) -> None:
    state = {"path": str(tmp_path / "state")}
    quotas = ({"use": "ledger", "with": {"serve": True}}, {"use": "shared", "with": {"timeout_s": 5.0}})
    keeping, asking = ({**CAPPED, "state": state, "policies": {**BASE["policies"], "quota": quota}} for quota in quotas)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    async with running(tmp_path / "b", asking, echo=Echo(step_s=0.005)) as two:
        assert (await two.complete()).status_code == 503, "its keeper is not there yet"
        async with running(tmp_path / "a", keeping, echo=Echo(step_s=0.005)) as one:
            quota = two.gateway.parts.runtime.current.quota
            await until(quota.writable, "a keeper that comes later is taken up")  # type: ignore[attr-defined]
            calls = [site.complete(max_tokens=56, ignore_eos=True) for site in (one, two) for _ in range(20)]
            answers = await asyncio.gather(*calls)
            assert sorted({answer.status_code for answer in answers}) == [200, 429]
            passed = [answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200]
            assert passed == [60] * 10
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert int(refused.headers["retry-after"]) >= 1
            for site in (one, two):
                await site.at_rest()
                report = (await site.admin.get("/admin/usage")).json()
                assert sum(row["output_tokens"] for row in report["rows"]) == 56 * len(passed)
        await until(lambda: not quota.writable(), "the keeper is gone")  # type: ignore[attr-defined]
        told = await two.complete("beta")
        assert (told.status_code, told.json()["error"]["code"]) == (503, "quota_unavailable")
        assert int(told.headers["retry-after"]) >= 1
        assert await two.metric("forebay_ledger_writable") == 0
