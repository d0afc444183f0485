"""What a durable quota costs: reservations and settlements per second, and how long a caller waits for each.

    python -m tests.bench.ledger_cost [--seconds 5] [--busy]

``--busy`` keeps the event loop busy beside it, as a gateway under load does: the writer's thread then has to share the
interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policies.quota.ledger import LedgerConfig, LedgerQuota
from policies.quota.token_bucket import TokenBucketQuota
from policies.testing import make_job
from policies.types import Charge, Job, Limits, QuotaAccount, TokenPrice

LIMITS = Limits(
    requests_per_minute=10**9, tokens_per_minute=10**9, tokens_per_day=10**12, concurrent=10**6, tokens_per_month=10**15
)
TENANTS, USERS = 50, 20


def jobs() -> Iterator[Job]:
    """Of many tenants and users, with limits at three levels."""
    for number in itertools.count():
        tenant, user = f"t{number % TENANTS}", f"u{number % USERS}"
        accounts = (
            QuotaAccount("organisation", "", "o", LIMITS),
            QuotaAccount("tenant", tenant, tenant, LIMITS),
            QuotaAccount("user", tenant, user, LIMITS),
        )
        yield make_job(
            f"{number:024x}",
            tenant,
            prompt=100,
            output=200,
            user=user,
            accounts=accounts,
            price=TokenPrice(100, 50, 400),
            organisation="o",
        )


async def measure(quota: Any, parallel: int, seconds: float, *, busy: bool) -> tuple[float, list[float]]:
    """Pairs of reservation and settlement per second, and the seconds that each pair took."""
    source, took = jobs(), []
    end = time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < end:
            job = next(source)
            begun = time.perf_counter()
            assert (await quota.reserve(job, time.monotonic())).admitted
            await quota.settle(job.id, Charge(80, 20, 50), time.monotonic())
            took.append(time.perf_counter() - begun)

    async def worker() -> None:
        while time.perf_counter() < end:
            turn = time.perf_counter() + 0.0005
            while time.perf_counter() < turn:
                pass
            await asyncio.sleep(0)

    begun = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(parallel)), *([worker()] if busy else []))
    return len(took) / (time.perf_counter() - begun), sorted(took)


async def main(seconds: float, *, busy: bool) -> None:
    """Print a table."""
    sys.stdout.write(f"{'policy':<16}{'parallel':>9}{'pairs/s':>10}{'p50 ms':>9}{'p99 ms':>9}\n")
    for name in ("token_bucket", "ledger normal", "ledger full"):
        for parallel in (1, 32, 256):
            with tempfile.TemporaryDirectory() as folder:
                quota: Any = TokenBucketQuota()
                if name != "token_bucket":
                    mode = name.partition(" ")[2]
                    quota = LedgerQuota(Path(folder) / "l.db", LedgerConfig.model_validate({"synchronous": mode}))
                    await quota.start()
                rate, took = await measure(quota, parallel, seconds, busy=busy)
                if name != "token_bucket":
                    await quota.close()
            p50, p99 = took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3
            sys.stdout.write(f"{name:<16}{parallel:>9}{rate:>10.0f}{p50:>9.2f}{p99:>9.2f}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--busy", action="store_true")
    options = parser.parse_args()
    asyncio.run(main(options.seconds, busy=options.busy))
