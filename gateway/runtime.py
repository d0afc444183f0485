"""The live policies, and how they are replaced while requests run.

Rules
- ``current`` is one frozen ``PolicySet`` with a generation; a request takes it once and keeps it. Routing and
  scheduling are asked live, per decision.
- A swap goes validate → build → start → one turn of the event loop that takes over state and assigns. Whatever fails
  before the assignment leaves everything as it was; all kinds of one swap change together or not at all.
- Scheduling: one instance per model, swapped in its queue (every queued job moves). Quota: the new one loads the old
  one's buckets and open reservations; a request that began with the old one settles with both, so that each closes
  its own record of it, once.
- A replaced policy is closed when the last request that may hold it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from gateway import log
from gateway.settings import Policies, PolicyUse
from gateway.timed import Observe, Timed, unwrap
from policies.registry import Registry
from policies.spi import (
    KINDS,
    AdmissionPolicy,
    AuthPolicy,
    CacheScopePolicy,
    Kind,
    Lifecycle,
    PolicyContext,
    QuotaPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)
from policies.types import JobId, Usage

_log = log.get("policies")


@dataclass(frozen=True, slots=True)
class PolicySet:
    """The policies of one generation. Scheduling policies live in their queues, one per model."""

    generation: int
    uses: Mapping[Kind, PolicyUse]
    auth: AuthPolicy
    quota: QuotaPolicy
    cache_scope: CacheScopePolicy
    routing: RoutingPolicy
    admission: AdmissionPolicy


class Queue(Protocol):
    """What a swap needs of a dispatcher."""

    def swap(self, policy: SchedulingPolicy, name: str, *, carry_state: bool = True) -> SchedulingPolicy:
        """Replace the scheduling policy; returns the old one. A failure changes nothing."""
        ...


class Runtime:
    """Owner of the live ``PolicySet``."""

    def __init__(
        self,
        registry: Registry,
        context: PolicyContext,
        policies: Policies,
        *,
        timer: Callable[[str], Observe],
        retire_after_s: float,
    ) -> None:
        """Builds every policy but the scheduling ones. ``timer`` gives the stopwatch's sink of a policy's name.

        Raises PolicyConfigError with its paths below ``policies.<kind>``.
        """
        self._registry = registry
        self._context = context
        self._timer = timer
        self._retire_after_s = retire_after_s
        self._queues: Mapping[str, Queue] = {}
        self._schedulers: dict[str, SchedulingPolicy] = {}
        self._lock = asyncio.Lock()
        self._retiring: dict[asyncio.Task[None], list[Any]] = {}
        uses: dict[Kind, PolicyUse] = {kind: getattr(policies, kind) for kind in KINDS}
        self.current = PolicySet(
            generation=1,
            uses=uses,
            auth=self.build("auth", uses["auth"]),
            quota=self.build("quota", uses["quota"]),
            cache_scope=self.build("cache_scope", uses["cache_scope"]),
            routing=self.build("routing", uses["routing"]),
            admission=self.build("admission", uses["admission"]),
        )

    def build(self, kind: Kind, use: PolicyUse) -> Any:
        """One policy with its stopwatch. Raises PolicyConfigError."""
        policy = self._registry.build(kind, use.use, use.with_, self._context)
        return Timed(kind, policy, self._timer(f"{kind}/{use.use}"))

    def scheduler(self, model: str) -> SchedulingPolicy:
        """A new scheduling policy for the queue of ``model``."""
        policy = cast(SchedulingPolicy, self.build("scheduling", self.current.uses["scheduling"]))
        self._schedulers[model] = policy
        return policy

    def attach(self, queues: Mapping[str, Queue]) -> None:
        """The queues, by model."""
        self._queues = queues

    async def start(self) -> None:
        """Start what has a lifecycle."""
        for policy in self._live():
            await _start(policy)

    async def close(self) -> None:
        """Close the live policies and those that were replaced lately."""
        retired = [policy for policies in self._retiring.values() for policy in policies]
        for task in list(self._retiring):
            task.cancel()
        for policy in [*retired, *self._live()]:
            await _close(policy)

    async def swap(self, changes: Mapping[Kind, PolicyUse]) -> PolicySet:
        """Replace the policies of these kinds together; returns the new set.

        Raises PolicyConfigError for a mistake in the configuration, or what a policy raised while it started or took
        over; nothing has changed then.
        """
        async with self._lock:
            new: dict[Kind, Any] = {}
            schedulers: dict[str, SchedulingPolicy] = {}
            try:
                for kind, use in changes.items():
                    if kind == "scheduling":
                        schedulers = {model: self.build(kind, use) for model in self._queues}
                    else:
                        new[kind] = self.build(kind, use)
                for policy in [*new.values(), *schedulers.values()]:
                    await _start(policy)
                old = self._take_over(changes, new, schedulers)
            except BaseException:
                for policy in [*new.values(), *schedulers.values()]:
                    await _close(policy)
                raise
            self._retire(old)
            names = {kind: use.use for kind, use in changes.items()}
            _log.info("policies_swapped", generation=self.current.generation, policies=names)
            return self.current

    async def settle(self, quota: QuotaPolicy, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Settle with the quota policy the request began with, and with the live one if that took it over since."""
        try:
            return await quota.settle(job_id, usage, now)
        finally:
            live = self.current.quota
            if live is not quota:
                await live.settle(job_id, usage, now)

    def _take_over(
        self, changes: Mapping[Kind, PolicyUse], new: Mapping[Kind, Any], schedulers: Mapping[str, SchedulingPolicy]
    ) -> list[Any]:
        """The atomic part: no await. Returns what was replaced."""
        if "quota" in new:
            new["quota"].load(self.current.quota.dump())
        swapped: list[tuple[Queue, SchedulingPolicy]] = []
        try:
            for model, policy in schedulers.items():
                queue = self._queues[model]
                swapped.append((queue, queue.swap(policy, changes["scheduling"].use)))
        except BaseException:
            for queue, before in swapped:
                queue.swap(before, self.current.uses["scheduling"].use, carry_state=False)
            raise
        old: list[Any] = [getattr(self.current, kind) for kind in new]
        old.extend(before for _, before in swapped)
        self._schedulers.update(schedulers)
        self.current = replace(
            self.current,
            generation=self.current.generation + 1,
            uses={**self.current.uses, **changes},
            **cast(dict[str, Any], new),
        )
        return old

    def _retire(self, policies: list[Any]) -> None:
        holding = [policy for policy in policies if isinstance(unwrap(policy), Lifecycle)]
        if not holding:
            return

        async def later() -> None:
            await asyncio.sleep(self._retire_after_s)
            for policy in holding:
                await _close(policy)

        task = asyncio.create_task(later(), name="retire policies")
        self._retiring[task] = holding
        task.add_done_callback(lambda task: self._retiring.pop(task, None))

    def _live(self) -> list[Any]:
        others = [getattr(self.current, kind) for kind in KINDS if kind != "scheduling"]
        return [*others, *self._schedulers.values()]


async def _start(policy: Any) -> None:
    inner = unwrap(policy)
    if isinstance(inner, Lifecycle):
        await inner.start()


async def _close(policy: Any) -> None:
    """Closing is the policy's own business; its failure is logged, and keeps nothing else from being closed."""
    inner = unwrap(policy)
    if isinstance(inner, Lifecycle):
        try:
            await inner.close()
        except Exception as error:
            _log.error("policy_close_failed", policy=type(inner).__name__, failure=log.describe(error))
