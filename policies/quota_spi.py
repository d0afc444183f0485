"""What a quota policy implements: one Protocol it must, others it may. ``policies.spi`` has them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from policies.types import (
    DeviceTime,
    DeviceUse,
    Job,
    JobId,
    LimitState,
    LimitStatus,
    QuotaAccount,
    QuotaDecision,
    TenantId,
    Usage,
    UsageQuery,
    UsageRow,
)

Json = dict[str, Any]


@runtime_checkable
class QuotaPolicy(Protocol):
    """One reservation serves quota and scheduler: taken before the queue, settled once in a shielded ``finally``."""

    async def reserve(self, job: Job, now: float) -> QuotaDecision:
        """Take request, token and concurrency units for ``job`` in one step, all or nothing. Idempotent per job id."""
        ...

    async def settle(self, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Replace the reservation by what really ran and free its slot. Unknown or settled ids are no-ops.

        Returns figures for the span: at least ``refunded`` (tokens given back; negative when more ran than reserved).
        """
        ...

    def dump(self) -> Json:
        """State that must survive a swap: buckets and open reservations."""
        ...

    def load(self, state: Json) -> None:
        """Take over another instance's ``dump()``; unknown keys are ignored."""
        ...


@runtime_checkable
class NeverWaits(Protocol):
    """Optional for a quota policy with all of its state in memory: ``settle`` never suspends, so it needs no task of
    its own, and answers go out earlier. The settlement of one that does suspend fails; its lease frees what it held.
    """

    never_waits: Literal[True]


@runtime_checkable
class QuotaView(Protocol):
    """Optional for a quota policy: figures without a reservation, for headers and admin views."""

    def remaining(self, tenant: TenantId, now: float) -> Mapping[str, LimitState]:
        """As ``QuotaDecision.remaining``; empty when nothing is kept of it. No I/O."""
        ...


@runtime_checkable
class Durable(Protocol):
    """Optional for a quota policy that keeps what is settled on a disk or elsewhere."""

    def writable(self) -> bool:
        """Whether that works now; false is an alert (``forebay_ledger_writable``). No I/O: what the last write said."""
        ...


@runtime_checkable
class QuotaAccounts(Protocol):
    """Optional for a quota policy with limits at several levels. Sync, no I/O."""

    def tightest(self, accounts: tuple[QuotaAccount, ...], now: float) -> Mapping[str, LimitState]:
        """As ``QuotaDecision.remaining``, without a reservation."""
        ...

    def status(self, accounts: tuple[QuotaAccount, ...], now: float) -> list[LimitStatus]:
        """Every limit of these accounts, with what is left."""
        ...


@runtime_checkable
class AccountsElsewhere(Protocol):
    """Optional for a quota policy whose figures another process has: ``QuotaAccounts.status``, asked for."""

    async def look_up(self, accounts: tuple[QuotaAccount, ...], now: float) -> list[LimitStatus]:
        """Every limit of these accounts, with what is left. Raises PolicyUnavailableError."""
        ...


KeyClaim = Literal["ours", "elsewhere", "other_body"]
"""Whose an idempotency key is: whoever asks may run its request; another gateway has it; for another body."""


@runtime_checkable
class SharedKeys(Protocol):
    """Optional for a quota policy that several gateways count in: which of them answers to an idempotency key.

    Names and bodies are digests. What was claimed is let go of, once.
    """

    async def claim(self, name: str, body: str, now: float) -> KeyClaim:
        """Ask for a name, before its request runs. Raises PolicyUnavailableError."""
        ...

    def keep(self, name: str, until: float) -> None:
        """It was answered, and its answer is kept until then (monotonic). No I/O that is waited for."""
        ...

    def release(self, name: str) -> None:
        """Let go of it. No I/O that is waited for."""
        ...


@runtime_checkable
class UsageReports(Protocol):
    """Optional for a quota policy that remembers what was settled."""

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """Sums, in the order of their groups. Raises ValueError for a dimension that is not known."""
        ...

    async def device_use(self, first: str, last: str) -> list[DeviceUse]:
        """What workers did on these days, both included."""
        ...

    async def devices_ran(self, jobs: Mapping[JobId, DeviceTime], use: Sequence[DeviceUse]) -> bool:
        """Add what workers did, for jobs and in all. False when it is not kept and has to be told again."""
        ...


@runtime_checkable
class QueueAware(Protocol):
    """Optional for a quota policy that limits how many jobs wait."""

    def started(self, job_id: JobId) -> None:
        """The job left the queue for a worker. At once, no I/O; may come again after a worker was lost."""
        ...
