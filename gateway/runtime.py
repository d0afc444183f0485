"""The live policies, and how they are replaced while requests run.

Rules
- ``current`` is one frozen ``PolicySet`` with a generation; a request takes it once and keeps it. Routing and
  scheduling are asked live, per decision.
- A swap goes validate → build → start → one turn of the event loop that takes over state and assigns. Whatever fails
  before the assignment leaves everything as it was; all kinds of one swap change together or not at all.
- Scheduling: one instance per model, swapped in its queue (every queued job moves). Quota: the new one loads the old
  one's buckets and open reservations; a request that began with the old one settles with both, so that each closes
  its own record of it, once.
- A scheduling policy that fails is replaced in its queue at once (``policies/guard.py``). In its first second that
  undoes the swap: every queue goes back to the policy before, under a new generation. Later it concerns that queue
  alone, which goes on with ``fcfs``: ``PolicySet.fallbacks`` says so until the next swap.
- At most one candidate is tried in the shadow (``trial.py``); a swap of the scheduling policy ends it.
- A replaced policy is closed when the last request that may hold it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

from gateway import log
from gateway.settings import Policies, PolicyUse
from gateway.timed import Observe, Timed, unwrap
from gateway.trial import Trial
from policies.guard import Failover
from policies.registry import Registry
from policies.shadow import ShadowPolicy
from policies.spi import (
    KINDS,
    AdmissionPolicy,
    AuthPolicy,
    CacheScopePolicy,
    Kind,
    Lifecycle,
    PolicyContext,
    QueueAware,
    QuotaPolicy,
    RoutingPolicy,
    SchedulingPolicy,
)
from policies.types import JobId, Usage

_log = log.get("policies")


@dataclass(frozen=True, slots=True)
class Fallback:
    """What goes on in a queue whose scheduling policy failed."""

    failed: str
    running: str
    call: str
    """The method that it failed in."""
    error: str


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
    fallbacks: Mapping[str, Fallback] = field(default_factory=dict)
    """By model: queues that run something else than ``uses`` says, because that failed."""


class Queue(Protocol):
    """What a swap needs of a dispatcher."""

    @property
    def scheduling(self) -> tuple[str, SchedulingPolicy]:
        """The scheduling policy that is asked now, with its name."""
        ...

    def shadow(self, candidate: SchedulingPolicy | None) -> ShadowPolicy | None:
        """Have ``candidate`` watch the live policy from now on; None: nobody. Raises what the candidate raises."""
        ...

    def swap(
        self, policy: SchedulingPolicy, name: str, *, carry_state: bool = True, probation: bool = True
    ) -> SchedulingPolicy:
        """Replace the scheduling policy; returns the old one. A failure changes nothing.

        ``probation``: if it fails in its first second, the old one comes back.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Before:
    """What the last swap of the scheduling policy replaced."""

    use: PolicyUse
    fallbacks: Mapping[str, Fallback]
    policies: Mapping[str, tuple[str, SchedulingPolicy]]
    """Name and policy by model."""


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
        self._asked: tuple[QuotaPolicy | None, QueueAware | None] = (None, None)
        self._lock = asyncio.Lock()
        self._retiring: dict[asyncio.Task[None], list[Any]] = {}
        self._before: _Before | None = None
        self._trial: Trial | None = None
        self._trying: asyncio.Task[None] | None = None
        self._candidates: dict[str, SchedulingPolicy] = {}
        """Of the trial under way, by model: those that the queues may have."""
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

    def fallback(self) -> SchedulingPolicy:
        """A new policy that can be relied on, for a queue whose own failed."""
        return cast(SchedulingPolicy, self.build("scheduling", PolicyUse(use="fcfs")))

    def attach(self, queues: Mapping[str, Queue]) -> None:
        """The queues, by model."""
        self._queues = queues

    async def start(self) -> None:
        """Start what has a lifecycle."""
        for policy in self._live():
            await _start(policy)

    async def close(self) -> None:
        """Close the live policies and those that were replaced lately."""
        await self.end_trial("the gateway stops")
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
            if "scheduling" in changes and self._trial is not None and asyncio.current_task() is not self._trying:
                self._trial.end("cancelled", "another scheduling policy was swapped in")
            names = {kind: use.use for kind, use in changes.items()}
            _log.info("policies_swapped", generation=self.current.generation, policies=names)
            return self.current

    @property
    def trial(self) -> Trial | None:
        """The last shadow run, under way or over."""
        return self._trial

    async def try_in_shadow(self, use: PolicyUse, seconds: float) -> Trial:
        """Have a candidate watch all queues for ``seconds``, then swap it in; takes the place of a trial under way.

        Raises PolicyConfigError, or what the candidate raised while it started or took the queued jobs over.
        """
        async with self._lock:
            candidates: dict[str, SchedulingPolicy] = {model: self.build("scheduling", use) for model in self._queues}
            shadows: dict[str, ShadowPolicy] = {}
            try:
                for policy in candidates.values():
                    await _start(policy)
                await self.end_trial("another trial began")
                self._candidates = candidates
                for model, queue in self._queues.items():
                    if (shadow := queue.shadow(candidates[model])) is not None:
                        shadows[model] = shadow
            except BaseException:
                await self._let_go(candidates)
                raise
            trial = self._trial = Trial(use, seconds, shadows)
            self._trying = asyncio.create_task(self._try(trial, candidates), name="shadow run")
            _log.info("shadow_began", policy=use.use, seconds=seconds)
            return trial

    async def end_trial(self, reason: str) -> None:
        """End the trial under way, if there is one, without a switch."""
        if self._trial is not None and self._trying is not None:
            self._trial.end("cancelled", reason)
            self._trying.cancel()
            await asyncio.wait({self._trying})
            await self._let_go(self._candidates)  # a task that is cancelled before its first step does nothing at all

    async def _try(self, trial: Trial, candidates: dict[str, SchedulingPolicy]) -> None:
        try:
            await trial.run(lambda: self.swap({"scheduling": trial.use}))
        finally:
            await self._let_go(candidates)

    async def _let_go(self, candidates: dict[str, SchedulingPolicy]) -> None:
        """Take the candidates out of the queues, if they got there, and close each once."""
        if candidates is self._candidates:
            for queue in self._queues.values():
                queue.shadow(None)
        while candidates:
            _, policy = candidates.popitem()
            await _close(policy)

    def failed_over(self, model: str, failover: Failover) -> None:
        """The scheduling policy of ``model`` failed and another one took its place. Called in the midst of a turn."""
        asyncio.get_running_loop().call_soon(self._after_failover, model, failover)

    async def settle(self, quota: QuotaPolicy, job_id: JobId, usage: Usage, now: float) -> Mapping[str, Any]:
        """Settle with the quota policy the request began with, and with the live one if that took it over since."""
        try:
            return await quota.settle(job_id, usage, now)
        finally:
            live = self.current.quota
            if live is not quota:
                await live.settle(job_id, usage, now)

    def started(self, quota: QuotaPolicy, job_id: JobId) -> None:
        """A job left the queue: tell the quota policy it began with, and the live one. Raises what they raise."""
        own = self._queue_aware(quota)
        if own is not None:
            own.started(job_id)
        live = self.current.quota
        if live is not quota and (other := self._queue_aware(live)) is not None and other is not own:
            other.started(job_id)

    def _queue_aware(self, quota: QuotaPolicy) -> QueueAware | None:
        """The policy, if it wants to know of starts. Remembered for the last one: asking a class for its methods costs
        as much as a reservation.
        """
        if quota is not self._asked[0]:
            inner = unwrap(quota)
            self._asked = quota, inner if isinstance(inner, QueueAware) else None
        return self._asked[1]

    def _take_over(
        self, changes: Mapping[Kind, PolicyUse], new: Mapping[Kind, Any], schedulers: Mapping[str, SchedulingPolicy]
    ) -> list[Any]:
        """The atomic part: no await. Returns what was replaced."""
        if "quota" in new:
            new["quota"].load(self.current.quota.dump())
        replaced: dict[str, tuple[str, SchedulingPolicy]] = {}
        try:
            for model, policy in schedulers.items():
                queue = self._queues[model]
                name = queue.scheduling[0]
                replaced[model] = (name, queue.swap(policy, changes["scheduling"].use))
        except BaseException:
            for model, (name, before) in replaced.items():
                self._queues[model].swap(before, name, carry_state=False, probation=False)
            raise
        old: list[Any] = [getattr(self.current, kind) for kind in new]
        fallbacks = self.current.fallbacks
        if "scheduling" in changes:
            old.extend(before for _, before in replaced.values())
            self._before, fallbacks = _Before(self.current.uses["scheduling"], fallbacks, replaced), {}
            self._schedulers.update(schedulers)
        self.current = replace(
            self.current,
            generation=self.current.generation + 1,
            uses={**self.current.uses, **changes},
            fallbacks=fallbacks,
            **cast(dict[str, Any], new),
        )
        return old

    def _after_failover(self, model: str, failover: Failover) -> None:
        """Bring the books in line with what the queue did by itself, and the other queues with it."""
        if self._queues[model].scheduling[1] is self._schedulers[model]:
            return  # a swap, or the failure of another queue, has settled it already
        if self._trial is not None:
            self._trial.end("cancelled", "the live policy failed")
        uses, fallbacks = dict(self.current.uses), dict(self.current.fallbacks)
        before = self._before if failover.rolled_back else None
        concerned = [model] if before is None else list(self._queues)
        if before is not None:
            self._before = None
            uses["scheduling"], fallbacks = before.use, dict(before.fallbacks)
            for other in concerned:
                queue = self._queues[other]
                if queue.scheduling[1] is self._schedulers[other]:
                    _put_back(queue, *before.policies[other])
        else:
            why = f"{type(failover.error).__name__}: {failover.error}"  # the operator's own plugin: it is for them
            fallbacks[model] = Fallback(failover.failed, failover.successor, failover.call, why)
        self._retire([policy for other in concerned for policy in self._relieved(other)])
        self.current = replace(self.current, generation=self.current.generation + 1, uses=uses, fallbacks=fallbacks)
        event = "policy_fell_back" if before is None else "policy_rolled_back"
        _log.warning(event, generation=self.current.generation, failed=failover.failed, running=failover.successor)

    def _relieved(self, model: str) -> list[Any]:
        """Note which policy runs there now, which is not to be closed any more; returns the one that did before."""
        failed, running = self._schedulers[model], self._queues[model].scheduling[1]
        if failed is running:
            return []
        self._schedulers[model] = running
        for retiring in self._retiring.values():
            retiring[:] = [policy for policy in retiring if policy is not running]
        return [failed]

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


def _put_back(queue: Queue, name: str, policy: SchedulingPolicy) -> None:
    """Undo a swap in a queue in which it has not failed (yet)."""
    try:
        queue.swap(policy, name, probation=False)
    except Exception as error:
        _log.error("rollback_failed", policy=name, failure=log.describe(error))


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
