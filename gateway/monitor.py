"""What the request path reports while it works: counted as metrics and told to observers, never waited for.

``Monitor`` does nothing; ``LiveMonitor`` feeds Prometheus and the
``forebay_job_event`` observers.

Rules
- Every method returns at once and never raises: no report may cost a request anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pluggy

from gateway import log
from gateway.device_time import DeviceBook
from gateway.metrics import Metrics, Observe
from gateway.trace_attributes import quota_verdict
from policies.manager import notify
from policies.types import Charge, DeviceTime, Job, JobEvent, QuotaDecision, RouteDecision, Transition, Usage

_log = log.get("observers")


class Monitor:
    """Hears nothing. A base class and not a Protocol, so that a report added here breaks no other implementation."""

    def event(
        self,
        job: Job,
        transition: Transition,
        at: float,
        *,
        worker: str | None = None,
        outcome: str | None = None,
        reason: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        """A job made a transition."""

    def served(self, job: Job, charge: Charge) -> None:
        """Work ran for a job."""

    def routed(self, decision: RouteDecision) -> None:
        """A worker was picked."""

    def gap(self, job: Job, seconds: float, trace_id: str = "") -> None:
        """Seconds between two tokens of one choice. ``trace_id``: of a kept trace worth a look."""

    def quota(self, job: Job, decision: QuotaDecision) -> None:
        """The quota policy decided."""

    def stale(self, worker: str) -> None:
        """A job was gated without the worker's own figures, because these are too old."""

    def ran_for(self, job: Job, spent: DeviceTime) -> None:
        """A worker told what a job took of its device."""

    def device(self, model: str, worker: str, kinds: Mapping[str, int]) -> None:
        """A worker told where its device's time went so far, in nanoseconds by kind."""

    def fault(self, where: str) -> None:
        """An isolated part (a policy, an observer, a settlement) failed; the request path went on."""


OBSERVER_BUDGET_S = 0.05
"""An observer runs on the event loop: one that takes longer is set aside."""
SET_ASIDE_S = 60.0


class LiveMonitor(Monitor):
    """Feeds Prometheus and the observers of plugins. One that raises is counted; one that is slow is set aside too."""

    def __init__(
        self, metrics: Metrics, manager: pluggy.PluginManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._manager = manager
        self._clock = clock
        self._aside: dict[str, float] = {}
        """Observers that overran, and until when they hear nothing."""
        self._observed = bool(manager.hook.forebay_job_event.get_hookimpls())
        self.devices: DeviceBook | None = None
        """Keeps device time. Set once, after what it asks is made."""
        self._gaps: dict[tuple[str, str], Observe] = {}

    def event(
        self,
        job: Job,
        transition: Transition,
        at: float,
        *,
        worker: str | None = None,
        outcome: str | None = None,
        reason: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        """Tell the observers, one by one."""
        if self._observed:
            told = JobEvent(job, transition, at, worker=worker, outcome=outcome, reason=reason, usage=usage)
            begun = self._clock()
            if self._aside:
                self._aside = {plugin: until for plugin, until in self._aside.items() if until > begun}

            def done(plugin: str) -> None:
                nonlocal begun
                took, begun = self._clock() - begun, self._clock()
                if took > OBSERVER_BUDGET_S:
                    self._aside[plugin] = begun + SET_ASIDE_S
                    self._metrics.fault("observer")
                    _log.warning("observer_slow", plugin=plugin, took_s=round(took, 3), set_aside_s=SET_ASIDE_S)

            notify(self._manager, told, self._observer_failed, skip=self._aside, on_done=done)

    def served(self, job: Job, charge: Charge) -> None:
        """Count tokens."""
        self._metrics.charged(job.tenant, job.service_class, charge)

    def routed(self, decision: RouteDecision) -> None:
        """Count the dispatch."""
        self._metrics.routed(decision.worker, decision.reason)

    def gap(self, job: Job, seconds: float, trace_id: str = "") -> None:
        """Observe the latency."""
        key = (job.model, job.service_class)
        observe = self._gaps.get(key)
        if observe is None:
            observe = self._gaps[key] = self._metrics.inter_token(*key)
        observe(seconds, {"trace_id": trace_id} if trace_id else None)

    def quota(self, job: Job, decision: QuotaDecision) -> None:
        """Count the verdict."""
        self._metrics.quota_decided(job.tenant, job.service_class, quota_verdict(decision))

    def stale(self, worker: str) -> None:
        """Count the dispatch."""
        self._metrics.stale_dispatch(worker)

    def ran_for(self, job: Job, spent: DeviceTime) -> None:
        """Keep it for the ledger."""
        if self.devices is not None:
            self.devices.ran_for(job.id, spent)

    def device(self, model: str, worker: str, kinds: Mapping[str, int]) -> None:
        """Keep it for the ledger."""
        if self.devices is not None:
            self.devices.worker(model, worker, kinds)

    def fault(self, where: str) -> None:
        """Count the failure."""
        self._metrics.fault(where)

    def _observer_failed(self, plugin: str, error: Exception) -> None:
        self._metrics.fault("observer")
        _log.error("observer_failed", plugin=plugin, failure=log.describe(error))
