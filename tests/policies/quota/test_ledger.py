"""The durable quota: what is settled outlives kill -9, a full disk and a restart; reports say what was settled."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from policies.quota import _ledger_reports as reports
from policies.quota import _ledger_schema as schema
from policies.quota._ledger_file import LedgerError
from policies.quota.ledger import LedgerConfig, LedgerQuota
from policies.quota.token_bucket import TokenBucketQuota
from policies.quota.unlimited import UnlimitedQuota
from policies.spi import PolicyUnavailableError, Shared
from policies.testing import make_job
from policies.types import (
    Charge,
    DeviceTime,
    DeviceUse,
    Job,
    JobId,
    Limits,
    QuotaAccount,
    TenantId,
    TokenPrice,
    UsageQuery,
)

A = TenantId("a")
EVER = UsageQuery("0000-01-01", "9999-12-31")
PRICE = TokenPrice(100, 20, 400)


@contextlib.asynccontextmanager
async def ledger(folder: Path, shared: Shared | None = None, **settings: Any) -> AsyncIterator[LedgerQuota]:
    quota = LedgerQuota(folder / "ledger.db", LedgerConfig(**settings), shared=shared)
    await quota.start()
    try:
        yield quota
    finally:
        await quota.close()


def job(name: str, prompt: int = 10, output: int = 10, user: str | None = None, **limits: Any) -> Job:
    limits_of_user = {"accounts": ()}
    if user is not None:
        own = QuotaAccount("tenant", "a", "a", Limits(**limits))
        limits_of_user = {"accounts": (own, QuotaAccount("user", "a", user))}  # type: ignore[dict-item]
    return make_job(
        name,
        prompt=prompt,
        output=output,
        user=user,
        price=PRICE,
        limits=Limits(**limits),
        cost_centre="c",
        **limits_of_user,
    )


def rows(folder: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(folder / "ledger.db")) as connection:
        return connection.execute(query).fetchall()


async def test_every_reservation_and_settlement_is_a_row_without_content(tmp_path: Path) -> None:
    async with ledger(tmp_path) as quota:
        assert (await quota.reserve(job("x", 100, 200, "u"), 0.0)).admitted
        assert (await quota.reserve(job("y", 100, 200, "u"), 0.0)).admitted
        figures = await quota.settle(JobId("x"), Charge(60, 40, 50), 1.0)
        assert (figures["refunded"], figures["cost"], figures["stored"]) == (150, 6000 + 800 + 20_000, True)
        assert (await quota.settle(JobId("x"), Charge(60, 40, 50), 1.0)) == {"refunded": 0}
        await quota.settle(JobId("y"), Charge(), 1.0)
    found = rows(tmp_path, "SELECT id, tenant, user, model, class, cost_centre, prompt, output, cost FROM reservations")
    assert found == [(name, "a", "u", "model", "interactive", "c", 100, 200, 90_000) for name in "xy"]
    settled = rows(tmp_path, "SELECT seq, outcome, prompt, cached, output, cost FROM settlements")
    assert settled == [(1, "ran", 60, 40, 50, 26_800), (2, "nothing", 0, 0, 0, 0)]
    assert rows(tmp_path, "SELECT * FROM open") == []


async def test_two_hundred_at_once_over_admit_nothing(tmp_path: Path) -> None:
    """gateway A1: the books decide before anybody waits for the disk."""
    async with ledger(tmp_path) as quota:
        asked = [quota.reserve(job(f"j{i}", 20, 30, tokens_per_minute=1000), 0.0) for i in range(200)]
        decisions = await asyncio.gather(*asked)
        assert sum(decision.admitted for decision in decisions) == 20
        await asyncio.gather(*(quota.settle(JobId(f"j{i}"), Charge(20, 0, 30), 0.0) for i in range(200)))
        (total,) = await quota.usage(EVER)
        assert (total.requests, total.prompt, total.output) == (20, 400, 600)


async def test_a_restart_resets_nothing(tmp_path: Path) -> None:
    """Rates go on where they were, budgets keep the month, and what was open is free: its process is gone."""
    limits = {"tokens_per_day": 1000, "concurrent": 1, "tokens_per_month": 500}
    async with ledger(tmp_path) as quota:
        await quota.reserve(job("x", 100, 100, **limits), 0.0)
        await quota.settle(JobId("x"), Charge(100, 0, 100), 0.0)
        await quota.reserve(job("lost", 100, 100, **limits), 0.0)
        assert (await quota.reserve(job("y", 10, 10, **limits), 0.0)).limit == "concurrent"
    async with ledger(tmp_path) as quota:
        now = time.monotonic()
        status = {item.limit: item for item in quota.status(job("z", **limits).accounts or accounts(**limits), now)}
        assert status["tokens_per_day"].remaining == pytest.approx(600, abs=3), "nobody knows what the lost one ran"
        assert status["tokens_per_month"].remaining == 300
        assert status["concurrent"].remaining == 1
        refused = await quota.reserve(job("big", 100, 250, **limits), now)
        assert (refused.limit, refused.never) == ("tokens_per_month", False)
        assert (await quota.reserve(job("z", 100, 100, **limits), now)).admitted
    assert rows(tmp_path, "SELECT outcome FROM settlements ORDER BY seq") == [("ran",), ("expired",)]


def accounts(**limits: Any) -> tuple[QuotaAccount, ...]:
    return (QuotaAccount("tenant", "a", "a", Limits(**limits)),)


CHILD = """
import asyncio, sys
from pathlib import Path
from policies.quota.ledger import LedgerQuota
from policies.testing import make_job
from policies.types import Charge, JobId

async def main():
    quota = LedgerQuota(Path(sys.argv[1]))
    await quota.start()

    async def caller(number):
        for i in range(10**6):
            name = f"{number}-{i}"
            assert (await quota.reserve(make_job(name), 0.0)).admitted
            print("R", name, flush=True)
            await quota.settle(JobId(name), Charge(7, 0, 3), 0.0)
            print("S", name, flush=True)

    await asyncio.gather(*(caller(number) for number in range(16)))

asyncio.run(main())
"""


async def test_kill_9_loses_no_settled_token_and_frees_the_rest(tmp_path: Path) -> None:
    """gateway A5: whatever was told to be settled is there afterwards; whatever was open holds nothing any more."""
    path = tmp_path / "ledger.db"
    for lines in (300, 1100, 2003):
        with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            told = [child.stdout.readline().split() for _ in range(lines)]
            child.send_signal(signal.SIGKILL)
            told += [line.split() for line in child.stdout if line.endswith("\n")]
        settled = {name for what, name in told if what == "S"}
        async with ledger(tmp_path) as quota:
            known = dict(rows(tmp_path, "SELECT id, outcome FROM reservations JOIN settlements USING (seq)"))
            assert {known.get(name) for name in settled} == {"ran"}
            assert {name for what, name in told if what == "R"} <= set(known)
            assert quota.concurrent(A) == 0
            ran = sum(outcome == "ran" for outcome in known.values())
            (total,) = await quota.usage(EVER)
            assert (total.requests, total.prompt, total.output) == (ran, 7 * ran, 3 * ran)
        path.unlink()


async def test_a_full_disk_refuses_new_work_and_loses_no_row(tmp_path: Path) -> None:
    """A file that may not grow is a disk that is full: settlements are written all the same, and it recovers."""
    async with ledger(tmp_path, max_bytes=1 << 20) as quota:
        admitted: list[str] = []
        for i in range(20_000):
            try:
                assert (await quota.reserve(job(f"j{i}", tokens_per_minute=10**9, concurrent=10**6), 0.0)).admitted
            except PolicyUnavailableError:
                break
            admitted.append(f"j{i}")
        assert 100 < len(admitted) < 20_000
        assert not quota.writable()
        assert quota.concurrent(A) == len(admitted), "the refused one holds nothing"
        figures = await asyncio.gather(*(quota.settle(JobId(name), Charge(5, 0, 5), 0.0) for name in admitted))
        assert all(item["stored"] for item in figures)
        (total,) = await quota.usage(EVER)
        assert (total.requests, total.output) == (len(admitted), 5 * len(admitted))
    async with ledger(tmp_path) as quota:
        assert (await quota.reserve(job("again"), 0.0)).admitted
        assert quota.writable()


async def test_what_cannot_be_written_at_all_is_kept_and_written_first(tmp_path: Path) -> None:
    """Not even the ballast helps: settled all the same, told so, and in the file as soon as that works again."""
    async with ledger(tmp_path) as quota:
        for name in ("x", "y"):
            await quota.reserve(job(name), 0.0)
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # nobody else can write: as good as a broken disk
            figures = await quota.settle(JobId("x"), Charge(10, 0, 10), 0.0)
            assert figures["stored"] is False
            with pytest.raises(PolicyUnavailableError):
                await quota.reserve(job("z"), 0.0)
            other.execute("ROLLBACK")
        assert (await quota.settle(JobId("y"), Charge(10, 0, 10), 0.0))["stored"] is True
        (total,) = await quota.usage(EVER)
        assert total.requests == 2
        assert (await quota.reserve(job("z"), 0.0)).admitted


async def test_leases_run_out_and_a_late_settlement_still_counts(tmp_path: Path) -> None:
    async with ledger(tmp_path, lease_s=10.0) as quota:
        await quota.reserve(job("x", 10, 90, concurrent=1, tokens_per_month=1000), 0.0)
        assert (await quota.reserve(job("y", concurrent=1, tokens_per_month=1000), 11.0)).admitted
        assert rows(tmp_path, "SELECT outcome FROM settlements") == [("expired",)]
        await quota.settle(JobId("x"), Charge(10, 0, 60), 12.0)
        assert rows(tmp_path, "SELECT outcome, output FROM settlements") == [("ran", 60)]
        known = quota.status(accounts(concurrent=1, tokens_per_month=1000), 12.0)
        left = {item.limit: item.remaining for item in known}
        assert left == {"concurrent": 0, "tokens_per_month": 1000 - 20 - 70}


async def test_one_process_owns_a_file(tmp_path: Path) -> None:
    async with ledger(tmp_path):
        command = [sys.executable, "-c", CHILD, str(tmp_path / "ledger.db")]
        child = subprocess.run(command, capture_output=True, text=True)
        assert child.returncode != 0
        assert "the ledger is in use by process" in child.stderr
        assert "state.path" in child.stderr
    async with ledger(tmp_path) as quota:
        assert (await quota.reserve(job("x"), 0.0)).admitted


async def test_a_reload_shares_the_books(tmp_path: Path) -> None:
    """While the new instance starts the old one still has the file: one lock, one thread, one set of figures."""
    shared, limits = Shared(), {"tokens_per_day": 1000, "concurrent": 2}
    async with ledger(tmp_path, shared) as old:
        await old.reserve(job("x", 100, 100, **limits), 0.0)
        new = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(lease_s=50.0), shared=shared)
        await new.start()
        new.load(json.loads(json.dumps(old.dump())))
        assert new.concurrent(A) == 1
        assert (await old.reserve(job("late", 100, 100, **limits), 0.0)).admitted
        assert (await new.reserve(job("y", **limits), 0.0)).limit == "concurrent"
        await old.settle(JobId("x"), Charge(100, 0, 50), 0.0)
        assert (await new.settle(JobId("x"), Charge(100, 0, 50), 0.0)) == {"refunded": 0}
    assert new.concurrent(A) == 1
    assert (await new.reserve(job("y", **limits), 0.0)).admitted
    await new.close()
    assert rows(tmp_path, "SELECT count(*) FROM settlements WHERE outcome = 'ran'") == [(1,)]


async def test_no_swap_resets_a_budget(tmp_path: Path) -> None:
    """Through every policy and back: the month is spent, what is open settles, what was settled is in the file."""
    limits = {"tokens_per_month": 1000, "concurrent": 5}
    memory = TokenBucketQuota()
    await memory.reserve(job("x", 100, 200, **limits), 0.0)
    await memory.settle(JobId("x"), Charge(100, 0, 200), 0.0)
    await memory.reserve(job("open", 100, 200, **limits), 0.0)
    nobody = UnlimitedQuota()
    nobody.load(json.loads(json.dumps(memory.dump())))
    async with ledger(tmp_path) as quota:
        quota.load(json.loads(json.dumps(nobody.dump())))
        left = {item.limit: item.remaining for item in quota.status(accounts(**limits), 0.0)}
        assert left == {"tokens_per_month": 400, "concurrent": 4}
        await quota.settle(JobId("open"), Charge(100, 0, 50), 0.0)
        (total,) = await quota.usage(EVER)
        assert (total.requests, total.output) == (1, 50)
        memory.load(json.loads(json.dumps(quota.dump())))
    left = {item.limit: item.remaining for item in memory.status(accounts(**limits), 0.0)}
    assert left == {"tokens_per_month": 550, "concurrent": 5}


async def test_reports_group_and_filter(tmp_path: Path) -> None:
    async with ledger(tmp_path) as quota:
        for i, user in enumerate(("u", "u", "v")):
            await quota.reserve(job(f"j{i}", user=user), 0.0)
            await quota.settle(JobId(f"j{i}"), Charge(10, 0, i), 0.0)
        today = rows(tmp_path, "SELECT DISTINCT day FROM usage")[0][0]
        use = [DeviceUse(today, "model", "w", "idle", 70), DeviceUse(today, "model", "w", "computed", 30)]
        assert await quota.devices_ran({JobId("j0"): DeviceTime(5, 1, 2)}, use)
        assert await quota.devices_ran({JobId("j0"): DeviceTime(5)}, [DeviceUse(today, "model", "w", "idle", 1)])
        by_user = await quota.usage(UsageQuery(today, today, ("user", "cost_centre")))
        assert [(row.group["user"], row.requests, row.output) for row in by_user] == [("u", 2, 1), ("v", 1, 2)]
        assert by_user[0].device == DeviceTime(10, 1, 2)
        assert by_user[0].group["cost_centre"] == "c"
        only = await quota.usage(UsageQuery(today, today, ("day",), {"user": "v"}))
        assert [(row.group, row.cost) for row in only] == [({"day": today}, 1000 + 2 * 400)]
        assert (await quota.usage(UsageQuery("2000-01-01", "2000-01-02", ("user",)))) == []
        ran = await quota.device_use(today, today)
        assert [(item.kind, item.ns) for item in ran] == [("computed", 30), ("idle", 71)]
        for bad in (UsageQuery(today, today, ("seq",)), UsageQuery(today, today, (), {"1=1; --": "x"})):
            with pytest.raises(ValueError, match="unknown dimension"):
                await quota.usage(bad)


@pytest.mark.parametrize("only", [{}, {"tenant": "a"}, {"tenant": "a", "user": "ann"}], ids=len)
async def test_a_callers_own_month_reads_no_one_elses_rows(tmp_path: Path, only: dict[str, str]) -> None:
    """The same figures by lookups as by reading a range; with a large company's rows that is a thousand times less."""
    async with ledger(tmp_path) as quota:
        for number, user in enumerate(("ann", "bob", "ann")):
            await quota.reserve(job(f"x{number}", user=user), 0.0)
            await quota.settle(JobId(f"x{number}"), Charge(5, 0, number), 0.0)
        today = datetime.now(UTC).date()
        spans = [(today - timedelta(days), today) for days in (0, 30, 399, 400, 5000)]
        found = [await quota.usage(UsageQuery(str(first), str(last), (), only)) for first, last in spans]
        assert all(rows == found[0] for rows in found)
        assert found[0][0].requests == (2 if "user" in only else 3)
    condition, days = reports._days(UsageQuery("2026-11-01", "2026-11-30", (), only))
    text = f"EXPLAIN QUERY PLAN SELECT sum(cost) FROM usage WHERE {condition}"
    text += "".join(f" AND {name} = '{value}'" for name, value in only.items())
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        ((*_, plan),) = connection.execute(text, days)
    assert ("day=? AND tenant=?" in plan) is bool(only), plan


async def test_old_rows_go_and_sums_stay(tmp_path: Path) -> None:
    then = time.time() - 40 * 86_400
    old = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(), wall=lambda: then)
    await old.start()
    for i in range(5):
        await old.reserve(job(f"old{i}"), 0.0)
        await old.settle(JobId(f"old{i}"), Charge(1, 0, 1), 0.0)
    await old.close()
    async with ledger(tmp_path, keep_days=30) as quota:
        await quota.reserve(job("new"), 0.0)
        await quota.settle(JobId("new"), Charge(1, 0, 1), 0.0)
        writer = quota._open.writer
        assert writer is not None
        writer._keep_house()
        assert rows(tmp_path, "SELECT id FROM reservations JOIN settlements USING (seq)") == [("new",)]
        (total,) = await quota.usage(EVER)
        assert total.requests == 6


async def test_what_a_key_has_spent_is_not_kept_in_memory(tmp_path: Path) -> None:
    """A key has no budget, and each token may be one: a month of them would not fit."""
    async with ledger(tmp_path) as quota:
        own = QuotaAccount("tenant", A, "a")
        for number in range(8):
            key = QuotaAccount("key", A, f"k{number}", Limits(requests_per_minute=5))
            await quota.reserve(make_job(f"x{number}", prompt=10, output=10, accounts=(own, key)), 0.0)
            await quota.settle(JobId(f"x{number}"), Charge(10, 0, 10), 0.0)
        for number in range(9):
            await quota.reserve(make_job(f"y{number}", accounts=(own,)), 3600.0)
        assert {account["key"][0] for account in quota.dump()["accounts"]} == {"tenant"}


async def test_accounts_that_are_full_again_are_forgotten(tmp_path: Path) -> None:
    """With limits for keys every token leaves an account behind: for ever, and read at each start."""
    then = time.time() - 3 * 86_400
    old = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(), wall=lambda: then)
    await old.start()
    limits = Limits(tokens_per_day=1000, requests_per_minute=5)
    for number, output in enumerate((5, 5, 10_000)):  # the last one ran far beyond what it had reserved
        name = f"old{number}"
        key = QuotaAccount("key", A, name, limits)
        asked = make_job(name, prompt=10, output=10, accounts=(QuotaAccount("tenant", A, "a"), key))
        assert (await old.reserve(asked, 0.0)).admitted
        await old.settle(JobId(name), Charge(10, 0, output), 0.0)
    await old.close()
    assert len(rows(tmp_path, "SELECT name FROM accounts")) == 4
    quota = LedgerQuota(tmp_path / "ledger.db")
    await quota.start()
    writer = quota._open.writer
    assert writer is not None
    await asyncio.to_thread(writer._keep_house)
    assert rows(tmp_path, "SELECT name FROM accounts") == [("old2",)]
    known = {tuple(account["key"]) for account in quota.dump()["accounts"]}
    assert known - {("tenant", "a", "a")} == {("key", "a", "old2")}
    await quota.close()


async def test_a_clock_that_leaps_deletes_no_row_and_spends_no_budget(tmp_path: Path) -> None:
    """Ahead for a moment, or back to 1970: rows go by their own age, and none while the calendar is ahead of time."""
    now = time.time()
    wall = [now]
    quota = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(keep_days=30), wall=lambda: wall[0])
    await quota.start()
    for name, moment in (("a", now), ("back", 5.0), ("b", now), ("ahead", now + 400 * 86_400), ("c", now)):
        wall[0] = moment
        await quota.reserve(job(name, tokens_per_month=1000), 0.0)
        await quota.settle(JobId(name), Charge(10, 0, 10), 0.0)
        writer = quota._open.writer
        assert writer is not None
        await asyncio.to_thread(writer._keep_house)
    ids = "SELECT id FROM reservations JOIN settlements USING (seq) ORDER BY seq"
    assert rows(tmp_path, ids) == [("a",), ("b",), ("ahead",), ("c",)]
    (status,) = quota.status(accounts(tokens_per_month=1000), 0.0)
    assert status.remaining == 1000 - 60
    await quota.close()
    async with ledger(tmp_path) as again:
        (status,) = again.status(accounts(tokens_per_month=1000), 0.0)
        assert status.remaining == 1000 - 60


async def test_files_that_are_no_ledgers_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"something else entirely, and long enough to be read as a database header" * 10)
    with pytest.raises(LedgerError, match=r"ledger\.db: the ledger cannot be opened"):
        async with ledger(tmp_path):
            raise AssertionError
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(LedgerError, match="something else's database"):
        async with ledger(tmp_path):
            raise AssertionError
    path.unlink()
    async with ledger(tmp_path):
        assert path.stat().st_mode & 0o077 == 0
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    with pytest.raises(LedgerError, match="from a newer version"):
        async with ledger(tmp_path):
            raise AssertionError


async def test_a_caller_that_gives_up_waiting_leaves_nothing_behind(tmp_path: Path) -> None:
    """The policy's time budget runs out while the row is on its way; the pipeline then settles it as nothing."""
    async with ledger(tmp_path) as quota:
        task = asyncio.create_task(quota.reserve(job("x", concurrent=1), 0.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await quota.settle(JobId("x"), Charge(), 0.0)
        assert quota.concurrent(A) == 0
        assert (await quota.reserve(job("y", concurrent=1), 0.0)).admitted
    assert rows(tmp_path, "SELECT outcome FROM settlements ORDER BY seq") == [("nothing",)]
