"""Device time on its way from workers into the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.device_time import YOUNG_NS, DeviceBook
from policies.types import DeviceTime, DeviceUse, JobId, UsageQuery, UsageRow


class Ledger:
    """Keeps what it is told, or is full."""

    def __init__(self) -> None:
        self.full = False
        self.jobs: list[tuple[str, DeviceTime]] = []
        self.use: dict[str, int] = {}

    async def devices_ran(self, jobs: Mapping[JobId, DeviceTime], use: Sequence[DeviceUse]) -> bool:
        if self.full:
            return False
        self.jobs.extend(jobs.items())
        for item in use:
            self.use[item.kind] = self.use.get(item.kind, 0) + item.ns
        return True

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        return []

    async def device_use(self, first: str, last: str) -> list[DeviceUse]:
        return []


async def test_differences_count_and_nothing_twice() -> None:
    ledger = Ledger()
    book = DeviceBook(lambda: ledger)
    long = YOUNG_NS
    book.worker("m", "w", {"idle": long, "computed": 50})  # ran before this gateway: where counting begins
    book.worker("m", "w", {"idle": long + 100, "computed": 80})
    book.worker("m", "w", {"idle": long + 100, "computed": 80})
    await book.flush()
    await book.flush()
    assert ledger.use == {"idle": 100, "computed": 30}
    book.worker("m", "w", {"idle": 5, "computed": 2})  # a new process of that name
    await book.flush()
    assert ledger.use == {"idle": 105, "computed": 32}
    book.worker("m", "young", {"idle": 10, "computed": 1})
    await book.flush()
    assert ledger.use == {"idle": 115, "computed": 33}


async def test_what_cannot_be_stored_is_kept() -> None:
    ledger = Ledger()
    book = DeviceBook(lambda: ledger)
    ledger.full = True
    book.worker("m", "w", {"idle": 0})
    book.worker("m", "w", {"idle": 7})
    book.ran_for(JobId("j"), DeviceTime(1, 2, 3))
    await book.flush()
    book.ran_for(JobId("j"), DeviceTime(1))
    book.worker("m", "w", {"idle": 9})
    assert ledger.jobs == []
    ledger.full = False
    await book.flush()
    assert (ledger.jobs, ledger.use) == ([("j", DeviceTime(2, 2, 3))], {"idle": 9})


async def test_without_a_ledger_nothing_piles_up() -> None:
    book = DeviceBook(object)
    for i in range(100):
        book.ran_for(JobId(str(i)), DeviceTime(1))
    await book.flush()
    assert book._jobs == {}
