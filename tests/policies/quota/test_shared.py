"""Several gateways, one set of books: what one alone would let pass, whoever is asked; and a keeper that is away."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.quota import _key_claims, _ledger_server, _ledger_wire
from policies.quota._key_claims import KeyClaims
from policies.quota._ledger_file import LedgerError, LedgerFile
from policies.quota._ledger_wire import decision_in, decision_out, job_in, job_out, socket_of
from policies.quota.ledger import LedgerConfig, LedgerQuota
from policies.quota.shared import SharedQuota
from policies.spi import PolicyUnavailableError, Shared
from policies.testing import make_job
from policies.types import (
    Charge,
    DeviceTime,
    DeviceUse,
    Job,
    JobId,
    Limits,
    LimitState,
    QuotaAccount,
    QuotaDecision,
    TenantId,
    TokenPrice,
    UsageQuery,
)
from tests.arch.source import ROOT

EVER = UsageQuery("0000-01-01", "9999-12-31")
SLOW = 30.0
"""For what must not be taken for a keeper that is away, on a busy machine."""


@contextlib.asynccontextmanager
async def keeper(folder: Path, shared: Shared | None = None, **settings: Any) -> AsyncIterator[LedgerQuota]:
    quota = LedgerQuota(folder / "ledger.db", LedgerConfig(serve=True, **settings), shared=shared)
    await quota.start()
    try:
        yield quota
    finally:
        await quota.close()


@contextlib.asynccontextmanager
async def replica(
    folder: Path, shared: Shared | None = None, timeout_s: float = SLOW, *, alone: bool = False
) -> AsyncIterator[SharedQuota]:
    """``alone``: its keeper comes later."""
    quota = SharedQuota(folder / "ledger.db", timeout_s, shared=shared)
    await quota.start()
    try:
        if not alone:
            await until(quota.writable, "it is connected")
        yield quota
    finally:
        with contextlib.suppress(RuntimeError):
            await quota.close()


async def until(condition: Callable[[], Any], what: str) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def job(name: str, prompt: int = 10, output: int = 10, **limits: Any) -> Job:
    return make_job(name, prompt=prompt, output=output, limits=Limits(**limits))


async def test_two_replicas_over_admit_nothing(tmp_path: Path) -> None:
    """gateway A1, security 65: with requests spread over three gateways the cap is the cap."""
    async with keeper(tmp_path) as own, replica(tmp_path) as one, replica(tmp_path) as two:
        everybody = (own, one, two)
        asked = [everybody[i % 3].reserve(job(f"j{i}", 20, 30, tokens_per_minute=1000), 0.0) for i in range(200)]
        decisions = await asyncio.gather(*asked)
        assert sum(decision.admitted for decision in decisions) == 20
        refused = next(decision for decision in decisions if not decision.admitted)
        assert (refused.limit, refused.never) == ("tokens_per_minute", False)
        assert refused.retry_after_s is not None
        admitted = [i for i, decision in enumerate(decisions) if decision.admitted]
        # Whoever ran it may not be who brings its settlement.
        await asyncio.gather(*(everybody[(i + 1) % 3].settle(JobId(f"j{i}"), Charge(20, 0, 30), 0.0) for i in admitted))
        for quota in everybody:
            (total,) = await quota.usage(EVER)
            assert (total.requests, total.prompt, total.output) == (20, 400, 600)


async def test_all_see_the_same_figures_at_once(tmp_path: Path) -> None:
    """gateway A13: what one spends the others have no more; a raised limit lets all of them pass."""
    async with keeper(tmp_path) as own, replica(tmp_path) as one, replica(tmp_path) as two:
        assert (await one.reserve(job("x", 50, 50, tokens_per_month=100), 0.0)).admitted
        figures = await one.settle(JobId("x"), Charge(50, 0, 50), 0.0)
        assert figures["stored"] is True
        everybody: tuple[LedgerQuota | SharedQuota, ...] = (own, one, two)
        for quota in everybody:
            refused = await quota.reserve(job("y", 1, 1, tokens_per_month=100), 0.0)
            assert (refused.admitted, refused.limit) == (False, "tokens_per_month")
        for place, quota in enumerate(everybody):
            assert (await quota.reserve(job(f"z{place}", 1, 1, tokens_per_month=200), 0.0)).admitted


async def test_a_replica_that_dies_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gateway A5: its slots are free after the grace; what it brings later still counts."""
    monkeypatch.setattr(_ledger_server, "GRACE_S", 0.05)
    now = time.monotonic()
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        for place in range(4):
            assert (await one.reserve(job(f"j{place}", concurrent=4), now)).admitted
        assert (await own.reserve(job("more", concurrent=4), now)).limit == "concurrent"
        one._line._run.cancel()  # type: ignore[union-attr]  # its process is gone, as far as the keeper can see
        await until(lambda: own.concurrent(TenantId("a")) == 0, "its slots are free")
        assert (await own.reserve(job("more", concurrent=4), time.monotonic())).admitted
        async with replica(tmp_path) as back:
            await back.settle(JobId("j0"), Charge(10, 0, 7), time.monotonic())
        (total,) = await own.usage(EVER)
        assert (total.requests, total.output) == (1, 7)


async def test_one_that_comes_back_in_time_keeps_what_it_holds(tmp_path: Path) -> None:
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        assert (await one.reserve(job("x", concurrent=1), 0.0)).admitted
        writer = one._line._writer
        assert writer is not None
        writer.close()
        await until(lambda: one._line._writer not in (None, writer) and one._line.up, "it is back")
        assert own.concurrent(TenantId("a")) == 1
        assert (await one.settle(JobId("x"), Charge(10, 0, 10), 0.0))["stored"]


async def test_said_twice_counts_once(tmp_path: Path) -> None:
    """security 71: the answer was lost on the way, and the same is said again."""
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        await one.reserve(job("x"), 0.0)
        await one.reserve(job("x"), 0.0)
        await one.settle(JobId("x"), Charge(10, 0, 5), 0.0)
        for _ in range(3):
            assert (await one.settle(JobId("x"), Charge(10, 0, 5), 0.0))["refunded"] == 0
        (total,) = await own.usage(EVER)
        assert (total.requests, total.output) == (1, 5)


async def test_a_reload_keeps_the_connection(tmp_path: Path) -> None:
    shared = Shared()
    async with keeper(tmp_path) as own, replica(tmp_path, shared) as old:
        await old.reserve(job("x", concurrent=2), 0.0)
        async with replica(tmp_path, shared) as new:
            assert new._line is old._line
            assert (await new.settle(JobId("x"), Charge(1, 0, 1), 0.0))["stored"]
        assert old.writable()
        assert own.concurrent(TenantId("a")) == 0


async def test_the_keepers_reload_goes_on_serving_or_stops(tmp_path: Path) -> None:
    shared = Shared()
    async with keeper(tmp_path, shared), replica(tmp_path) as one:
        new = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(serve=True, lease_s=5.0), shared=shared)
        await new.start()
        assert (await one.reserve(job("x"), 0.0)).admitted
        quiet = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(), shared=shared)
        await quiet.start()
        assert not socket_of(tmp_path / "ledger.db").exists()
        await until(lambda: not one.writable(), "it hung up")
        with pytest.raises(PolicyUnavailableError):
            await one.reserve(job("y"), 0.0)
        await quiet.close()
        await new.close()


async def test_device_time_and_reports_are_everybodys(tmp_path: Path) -> None:
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        await one.reserve(job("x"), 0.0)
        await one.settle(JobId("x"), Charge(10, 0, 5), 0.0)
        today = time.strftime("%Y-%m-%d", time.gmtime())
        assert await one.devices_ran({JobId("x"): DeviceTime(5, 1, 2)}, [DeviceUse(today, "model", "w", "idle", 70)])
        (total,) = await own.usage(EVER)
        assert total.device == DeviceTime(5, 1, 2)
        assert [use.ns for use in await one.device_use(today, today)] == [70]


async def test_nonsense_ends_one_connection_and_nothing_else(tmp_path: Path) -> None:
    """security 61: pickle's bytes are nonsense too. Whoever speaks another version is told so; the socket is its user's
    alone."""
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        path = socket_of(tmp_path / "ledger.db")
        assert path.stat().st_mode & 0o077 == 0
        hello = _ledger_wire.line("hello", _ledger_wire.VERSION, "stranger")
        bad = [
            b"GET / HTTP/1.1\r\n\r\n",
            pickle.dumps(["hello", _ledger_wire.VERSION, "stranger"]) + b"\n",
            b"[]\n",
            b'["hello"]\n',
            _ledger_wire.line("hello", 99, "stranger"),
            _ledger_wire.line("hello", _ledger_wire.VERSION, ""),
            hello + b'["reserve", 1]\n',
            hello + b'["reserve", 1, {}, 0]\n',
            hello + b'["reserve", 1, {"id": 5}, "x"]\n',
            hello + b'["settle", 1, "x", ["a", 0, 0], 0, 0]\n',
            hello + b'["drop tables"]\n',
            hello + b'["devices", 1, 1, [], {}]\n',
            hello + b'["devices", 1, {}, [], {}]\n',
            hello + b'["' + b"x" * (_ledger_wire.MAX_LINE + 10) + b'"]\n',
        ]
        for data in bad:
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(data)
            told = b""
            with contextlib.suppress(ConnectionError):  # it may hang up before it has read everything
                async with asyncio.timeout(30):
                    told = await reader.read()
            assert b"done" not in told
            writer.close()
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(_ledger_wire.line("hello", 99, "stranger"))
        assert b"run the same release" in await reader.read()
        writer.close()
        assert (await one.reserve(job("x"), 0.0)).admitted
        assert (await own.reserve(job("y"), 0.0)).admitted


async def test_a_gateway_that_does_not_read_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen peer: what waits for it is never taken, and the keeper ends all the same."""
    monkeypatch.setattr(_ledger_server, "FAREWELL_S", 0.05)
    async with asyncio.timeout(30), keeper(tmp_path) as own:
        _, writer = await asyncio.open_unix_connection(str(socket_of(tmp_path / "ledger.db")))
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a ReadTransport as well
        writer.write(_ledger_wire.line("hello", _ledger_wire.VERSION, "frozen") + _ledger_wire.line("ping") * 200_000)
        server = own._open._server
        assert server is not None
        await until(lambda: any(one.transport.get_write_buffer_size() for one in server._writers), "it is full")
    writer.transport.abort()


async def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with pytest.raises(LedgerError, match="at most 107 bytes"):
        async with keeper(folder):
            raise AssertionError
    async with keeper(tmp_path) as own:
        assert (await own.reserve(job("x"), 0.0)).admitted


async def test_three_that_write_beside_a_long_reader_lose_no_row(tmp_path: Path) -> None:
    """security 89: nobody writes the file but its keeper, so nobody waits for a lock; a reader holds up nothing."""
    async with keeper(tmp_path) as own, replica(tmp_path) as one, replica(tmp_path) as two:
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM reservations").fetchone() == (0,)

            async def caller(place: int, quota: LedgerQuota | SharedQuota) -> None:
                for turn in range(20):
                    name = f"{place}-{turn}"
                    assert (await quota.reserve(job(name), 0.0)).admitted
                    assert (await quota.settle(JobId(name), Charge(1, 0, 1), 0.0))["stored"]

            everybody = (own, one, two)
            await asyncio.gather(*(caller(place, everybody[place % 3]) for place in range(30)))
            assert reader.execute("SELECT count(*) FROM reservations").fetchone() == (0,)
        (total,) = await two.usage(EVER)
        assert (total.requests, total.output) == (600, 600)


KEEPER = """
import asyncio, sys
from pathlib import Path
from policies.quota.ledger import LedgerConfig, LedgerQuota

async def main():
    quota = LedgerQuota(Path(sys.argv[1]), LedgerConfig(serve=True))
    await quota.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().create_future()

asyncio.run(main())
"""


@contextlib.contextmanager
def process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A keeper in a process of its own."""
    command = [sys.executable, "-c", KEEPER, str(folder / "ledger.db")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


async def test_a_frozen_keeper_costs_one_request_its_patience(tmp_path: Path) -> None:
    """gateway E1, security 87: refused, at once after the first; nothing of what was given up stays held."""
    with process(tmp_path) as child:
        async with replica(tmp_path, timeout_s=0.25) as one:
            await until(lambda: one.writable(), "it is there")
            for attempt in range(100):  # a busy machine may need several
                with contextlib.suppress(PolicyUnavailableError):
                    if (await one.reserve(job(f"x{attempt}", tokens_per_month=1000), 0.0)).admitted:
                        break
                await until(lambda: one.writable(), "it answers")
            running = JobId(f"x{attempt}")
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(PolicyUnavailableError):
                await one.reserve(job("first", concurrent=1), 0.0)
            assert not one.writable()
            for number in range(200):
                with pytest.raises(PolicyUnavailableError):
                    await one.reserve(job(f"n{number}", concurrent=1), 0.0)
                assert not one._line._asked, "nobody waits for it any more"
            assert (await one.settle(running, Charge(10, 0, 4), 0.0))["stored"] is False
            child.send_signal(signal.SIGCONT)
            await until(lambda: one.writable() and not one._line.owed, "it is taken up again, and told everything")

            async def passes() -> bool:
                with contextlib.suppress(PolicyUnavailableError):
                    return (await one.reserve(job("after", concurrent=1), 0.0)).admitted
                return False

            async with asyncio.timeout(30):
                while not await passes():
                    await asyncio.sleep(0.05)
            (total,) = await one.usage(EVER)
            assert (total.requests, total.output) == (1, 4)


async def test_device_time_told_to_a_frozen_keeper_counts_once(tmp_path: Path) -> None:
    """It adds up, and what waits in the socket is read when the keeper thaws, however often it was said."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    told = waiting = 0

    async def tell(one: SharedQuota, ns: int) -> None:
        nonlocal told, waiting
        told, waiting = told + ns, waiting + ns
        if await one.devices_ran({}, [DeviceUse(today, "model", "w", "idle", waiting)]):
            waiting = 0

    with process(tmp_path) as child:
        async with replica(tmp_path, timeout_s=0.25) as one:
            await until(lambda: one.writable(), "it is there")
            child.send_signal(signal.SIGSTOP)
            for _ in range(3):
                await tell(one, 1000)
            child.send_signal(signal.SIGCONT)
            await until(lambda: one.writable(), "it is taken up again")
            async with asyncio.timeout(60):
                while waiting or one._line._unheard is not None:
                    await tell(one, 1)
            assert [use.ns for use in await one.device_use(today, today)] == [told]


async def test_what_was_told_of_devices_counts_once_in_any_order(tmp_path: Path) -> None:
    """The lines of a connection that was given up may be read after those of the next one."""
    async with keeper(tmp_path) as own:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        server = own._open._server
        assert server is not None
        told = [server._devices("one", batch, {}, [DeviceUse(today, "m", "w", "idle", 1)]) for batch in (1, 1, 2, 1, 2)]
        assert await asyncio.gather(*told) == [True] * 5
        assert await server._devices("two", 1, {}, [DeviceUse(today, "m", "w", "idle", 1)])
        assert [use.ns for use in await own.device_use(today, today)] == [3]


async def test_a_keeper_that_is_killed_and_comes_back_is_brought_what_ran(tmp_path: Path) -> None:
    """security 73: what was running then is in the reports, and holds no slot; new work is refused meanwhile."""
    async with replica(tmp_path, alone=True) as one:
        with process(tmp_path) as child:
            await until(lambda: one.writable(), "a keeper that comes late is taken up")
            for place in range(8):
                asked = make_job(f"j{place}", limits=Limits(concurrent=8), price=TokenPrice(1, 1, 10))
                assert (await one.reserve(asked, time.monotonic())).admitted
            child.send_signal(signal.SIGKILL)
            await until(lambda: not one.writable(), "it is gone")
            with pytest.raises(PolicyUnavailableError):
                await one.reserve(job("new"), 0.0)
            for place in range(8):
                figures = await one.settle(JobId(f"j{place}"), Charge(10, 0, place), time.monotonic())
                assert figures["stored"] is False
        with process(tmp_path):
            await until(lambda: one.writable() and not one._line.owed, "all is told")
            for place in range(8):
                assert (await one.reserve(job(f"k{place}", concurrent=8), time.monotonic())).admitted
            (total,) = await one.usage(EVER)
            assert (total.requests, total.prompt, total.output) == (8, 80, sum(range(8)))
            assert total.cost == 80 + 10 * sum(range(8))


def test_what_goes_over_the_line_comes_out_the_same() -> None:
    accounts = (
        QuotaAccount("organisation", "", "acme", Limits(tokens_per_day=5)),
        QuotaAccount("tenant", "a", "a", Limits(concurrent=3, currency_per_month=7)),
        QuotaAccount("user", "a", "ü", Limits()),
    )
    one = Job(
        *(JobId("x"), TenantId("a"), "m", 3, 4, 5.0),
        user="ü",
        key_id="k",
        service_class="batch",
        adapter="sql",
        organisation="acme",
        cost_centre="c",
        accounts=accounts,
        price=TokenPrice(1, 2, 3),
    )
    assert job_in(json.loads(json.dumps(job_out(one)))) == one
    alone = make_job("y", limits=Limits(concurrent=2))
    assert job_in(job_out(alone)).accounts == (QuotaAccount("tenant", "a", "a", Limits(concurrent=2)),)
    decision = QuotaDecision(False, "concurrent", 5, 1.5, remaining={"tokens": LimitState(5, 3, 0.5)}, level="user")
    assert decision_in(json.loads(json.dumps(decision_out(decision)))) == decision
    assert "prefix_keys" not in job_out(one)


async def test_a_disk_that_answers_nothing_ends_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the folder come as OSError, not as SQLite's: the thread lives on, and nobody waits for ever."""

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with asyncio.timeout(30), keeper(tmp_path) as own:
        assert (await own.reserve(job("x"), 0.0)).admitted
        with monkeypatch.context() as broken:
            for method in ("write", "write_at_all_costs", "recovered"):
                broken.setattr(LedgerFile, method, fails)
            for name in ("y", "z"):
                with pytest.raises(PolicyUnavailableError):
                    await own.reserve(job(name), 0.0)
            assert (await own.settle(JobId("x"), Charge(5, 0, 2), 0.0))["stored"] is False
        assert (await own.reserve(job("z"), 0.0)).admitted
        await own.settle(JobId("z"), Charge(1, 0, 1), 0.0)
        assert sum(row.requests for row in await own.usage(EVER)) == 2


# Reloads and their rollback -------------------------------------------------------------------------------------------


async def test_a_reload_that_is_rolled_back_leaves_the_ledger_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new instance was started (it serves nobody, and leases are short), then another policy would not start."""
    monkeypatch.setattr(_ledger_server, "GRACE_S", 0.05)
    shared = Shared()
    async with keeper(tmp_path, shared, lease_s=500.0) as own, replica(tmp_path) as one, replica(tmp_path) as gone:
        now = time.monotonic()
        assert (await gone.reserve(job("left", concurrent=2), now)).admitted
        candidate = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(serve=False, lease_s=7.0), shared=shared)
        await candidate.start()
        await until(lambda: not one.writable(), "nobody is served meanwhile")
        gone._line._run.cancel()  # type: ignore[union-attr]  # its process is gone before it could come back
        await candidate.close()
        await until(one.writable, "it is served again")
        assert own._open.book.lease_s == 500.0
        assert (await one.reserve(job("x", concurrent=2), now)).admitted
        await until(lambda: own.concurrent(TenantId("a")) == 1, "what nobody came back for is free")


async def test_the_instance_that_was_started_last_decides_and_hands_over(tmp_path: Path) -> None:
    """A reload that holds: the old instance goes later, and takes nothing with it."""
    shared = Shared()
    old = LedgerQuota(tmp_path / "ledger.db", LedgerConfig(serve=True), shared=shared)
    await old.start()
    async with keeper(tmp_path, shared, lease_s=60.0) as new, replica(tmp_path) as one:
        await old.close()
        assert (await one.reserve(job("x"), 0.0)).admitted
        assert one.writable()
        assert new._open.book.lease_s == 60.0


async def test_a_candidate_that_cannot_listen_changes_nothing(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    shared = Shared()
    old = LedgerQuota(deep / "ledger.db", LedgerConfig(), shared=shared)
    await old.start()
    candidate = LedgerQuota(deep / "ledger.db", LedgerConfig(serve=True), shared=shared)
    with pytest.raises(LedgerError, match="at most 107 bytes"):
        await candidate.start()
    assert (await old.reserve(job("x"), 0.0)).admitted
    await old.close()


# What is left ---------------------------------------------------------------------------------------------------------


async def test_a_replica_tells_what_is_left_as_the_keeper_does(tmp_path: Path) -> None:
    account = QuotaAccount("tenant", TenantId("a"), "a", Limits(concurrent=4, tokens_per_month=1000))
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        now = time.monotonic()
        assert (await one.reserve(job("x", 50, 50, concurrent=4, tokens_per_month=1000), now)).admitted
        told = await one.look_up((account,), now)
        for ours, theirs in zip(told, own.status((account,), now), strict=True):
            assert ours == replace(theirs, reset_s=ours.reset_s)
            assert ours.reset_s == pytest.approx(theirs.reset_s, abs=SLOW)
        assert {status.limit: status.remaining for status in told} == {"concurrent": 3, "tokens_per_month": 900}
    async with replica(tmp_path, alone=True, timeout_s=0.1) as late:
        with pytest.raises(PolicyUnavailableError):
            await late.look_up((account,), now)


# Idempotency keys -----------------------------------------------------------------------------------------------------


async def test_a_key_belongs_to_one_gateway(tmp_path: Path) -> None:
    """security 75: whoever asks first has it, until it lets go; the body decides what the others are told."""
    async with keeper(tmp_path) as own, replica(tmp_path) as one, replica(tmp_path) as two:
        now = time.monotonic()
        found = await asyncio.gather(*(quota.claim("k", "body", now) for quota in (one, two, own)))
        assert sorted(found) == ["elsewhere", "elsewhere", "ours"]
        holder = (one, two, own)[found.index("ours")]
        others = [quota for quota in (one, two, own) if quota is not holder]
        for quota in others:
            quota.release("k")  # not theirs
            assert await quota.claim("k", "other", now) == "other_body"
        holder.keep("k", now + 60)
        for quota in others:
            assert await quota.claim("k", "body", now + 59) == "elsewhere"
        assert await others[0].claim("k", "body", now + 61) == "ours", "its answer is not kept any more"
        others[0].release("k")
        assert await others[1].claim("k", "other", now) == "ours"


async def test_keys_of_a_gateway_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran there may run again: it was not charged. What was answered there may not."""
    monkeypatch.setattr(_ledger_server, "GRACE_S", 0.05)
    now = time.monotonic()
    async with keeper(tmp_path) as own, replica(tmp_path) as one:
        for name in ("ran", "answered"):
            assert await one.claim(name, "body", now) == "ours"
        one.keep("answered", now + 600)
        await until(lambda: own._open.claims._claims["answered"].until is not None, "the keeper has heard of it")
        one._line._run.cancel()  # type: ignore[union-attr]
        await until(lambda: len(own._open.claims) == 1, "it is gone")
        assert await own.claim("ran", "body", now) == "ours"
        assert await own.claim("answered", "body", now) == "elsewhere"


async def test_keys_are_told_to_a_keeper_that_began_anew(tmp_path: Path) -> None:
    now = time.monotonic()
    async with replica(tmp_path, alone=True) as one:
        with pytest.raises(PolicyUnavailableError):
            await one.claim("k", "body", now)
        async with keeper(tmp_path):
            await until(one.writable, "it is there")
            assert await one.claim("k", "body", now) == "ours"
            assert await one.claim("kept", "body", now) == "ours"
            one.keep("kept", now + 600)
        await until(lambda: not one.writable(), "it is gone")
        async with keeper(tmp_path) as again:
            await until(lambda: len(again._open.claims) == 2, "it knows the keys")
            assert await again.claim("k", "body", now) == "elsewhere"
            assert await again.claim("kept", "body", now + 601) == "ours"


def test_the_list_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_key_claims, "MAX_NAMES", 3)
    claims = KeyClaims()
    assert [claims.claim("a", name, "b", 0.0) for name in ("1", "2", "3")] == ["ours"] * 3
    claims.keep("a", "2", 10.0)
    assert claims.claim("a", "4", "b", 5.0) == "ours"
    assert claims.claim("b", "1", "b", 5.0) == "elsewhere", "what runs stays, answers go first"
    assert claims.claim("b", "5", "b", 5.0) == "ours"
    assert len(claims) == 3
