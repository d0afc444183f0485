"""A ``Drive`` with tiers below the device, whose host slots and files hold what ``FakeRunner`` checks.

A file keeps the very slots that were written; what is restored is read back through the block tables, so bytes under a
wrong key fail at the step that reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from tests.workers.engine.drive import Drive
from workers.config import EngineConfig
from workers.engine.block_hash import BlockKey
from workers.engine.plan import StepPlan
from workers.engine.planner import Planner
from workers.engine.testing import FakeRunner, Slot
from workers.engine.tier_desk import Found, Read, TierDesk, TierReport, Unlinked, Wrote, new_tiers
from workers.engine.tier_files import File

Content = list[Slot | None]


class MemoryStore:
    """A ``TierStore`` whose disk does nothing until ``work`` is called."""

    def __init__(self, runner: FakeRunner, slots: int, files: int) -> None:
        self.slots, self.files, self.block_bytes = slots, files, 100
        self.runner = runner
        self.disk: dict[BlockKey, tuple[File, Content]] = {}
        self.jobs: deque[Callable[[], TierReport]] = deque()
        self.full = False
        self.stuck = False
        self.spoiled: set[BlockKey] = set()
        """Keys whose files are damaged."""
        self.read_back: dict[BlockKey, Content] = {}
        self.writes = 0

    def begin(self, report: Callable[[TierReport], None]) -> None:
        """Scan."""
        if self.files:
            self.jobs.appendleft(lambda: Found([file for file, _ in self.disk.values()], last=True))

    def write(self, slot: int, file: File) -> None:
        content = list(self.runner.host[slot])

        def job() -> TierReport:
            if self.full:
                return Wrote(file.key, "ENOSPC")
            self.disk[file.key] = (file, content)
            self.spoiled.discard(file.key)
            self.writes += 1
            return Wrote(file.key)

        self.jobs.append(job)

    def unlink(self, key: BlockKey) -> None:
        def job() -> TierReport:
            if self.stuck:
                return Unlinked(key, "EACCES")
            self.disk.pop(key, None)
            return Unlinked(key)

        self.jobs.append(job)

    def read(self, key: BlockKey) -> None:
        def job() -> TierReport:
            if key in self.spoiled or key not in self.disk:
                return Read(key, None)
            self.read_back[key] = self.disk[key][1]
            return Read(key, b"", 1)

        self.jobs.append(job)

    def place(self, slot: int | None, report: Read) -> None:
        content = self.read_back.pop(report.key, None)
        if slot is not None:
            assert content is not None
            self.runner.host[slot] = list(content)

    def zero(self, slots: list[int]) -> None:
        for slot in slots:
            self.runner.host[slot] = [None] * self.runner.block_size

    def moved(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.jobs.clear()

    def holds(self, scope: bytes) -> int:
        """Slots of host memory and files that hold something of ``scope``."""
        contents = [*self.runner.host.values(), *(content for _, content in self.disk.values())]
        return sum(slot is not None and slot.scope == scope for content in contents for slot in content)


class TieredDrive(Drive):
    """``slots`` and ``files``: of the tiers. With ``eager`` the disk has done everything before each step."""

    def __init__(self, *, slots: int, files: int = 0, eager: bool = True, **config: Any) -> None:
        blocks = config.get("blocks", 64)
        super().__init__(**config)
        self.eager = eager
        self.store = MemoryStore(self.runner, slots, files)
        self.blocks = blocks
        self._tiered()

    def _tiered(self) -> None:
        self.tiers = new_tiers(self.config, self.store)
        self.planner = Planner(
            self.config,
            blocks=self.blocks,
            max_context=100_000,
            revision="rev",
            eos_ids=[999],
            records=True,
            tiers=self.tiers,
        )
        self.desk = TierDesk(self.tiers, self.store, lambda report: None)
        self.desk.carry_out()

    def restart(self) -> None:
        """The worker ends and starts again: only files outlive it."""
        self.store.close()
        config: EngineConfig = self.config
        self.runner = self.store.runner = FakeRunner(self.blocks, config.block_size, vocab=900, budget=config.step_rows)
        self.sent, self.last, self.tokens = {}, {}, {}
        self._tiered()

    def work(self, most: int = 1_000_000) -> None:
        """Let the disk do ``most`` of what it was asked."""
        for _ in range(most):
            if not self.store.jobs:
                break
            self.desk.handle(self.store.jobs.popleft()())

    def step(self) -> StepPlan | None:
        if self.eager:
            self.work()
        plan = super().step()
        self.desk.carry_out()
        if plan is None and self.eager and self.store.jobs:
            self.work()
            plan = super().step()
        return plan

    def ready(self, plan: StepPlan) -> None:
        self.desk.carry_out()
