"""Runs the shipped scenarios, each once per session, two at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np

from gateway.simulate.figures import Figures
from gateway.simulate.scenario import Use
from gateway.simulate.scenario_file import LoadedScenario, load, resolve
from gateway.simulate.simulation import simulate
from policies.manager import make_manager, register
from policies.registry import Registry
from policies.scheduling.vtc import VtcConfig, VtcScheduler
from policies.spi import PolicyContext, PolicySpec, hookimpl
from policies.types import Job, TenantId

SEEDS = (1, 2, 3)
ALONE = "alone"
NO_LIFT = "vtc_without_lift"
BY_KEY = "vtc_by_key"


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``policy`` None: the file's own; ``only``: nobody but this tenant."""

    scenario: str
    seed: int
    policy: str | None = None
    only: str | None = None


class Unlifted(VtcScheduler):
    """VTC without its counter lift: who was away has saved it all up."""

    def _floor(self) -> float:
        return 0.0


class ByKey(VtcScheduler):
    """VTC that takes every key for a tenant."""

    def push(self, job: Job, now: float) -> None:
        super().push(replace(job, tenant=TenantId(job.user or "")), now)


class Plugin:
    @hookimpl
    def forebay_policies(self) -> list[PolicySpec]:
        def unlifted(config: VtcConfig, ctx: PolicyContext) -> Unlifted:
            return Unlifted(config.tariff(), config.lengths())

        def by_key(config: VtcConfig, ctx: PolicyContext) -> ByKey:
            return ByKey(config.tariff(), config.lengths())

        return [
            PolicySpec("scheduling", NO_LIFT, VtcConfig, unlifted, "VTC as it should not be."),
            PolicySpec("scheduling", BY_KEY, VtcConfig, by_key, "VTC over keys, as it should not be."),
        ]


def prepared(case: Case) -> LoadedScenario:
    manager = make_manager()
    register(manager, Plugin(), "experiments")
    loaded = load(resolve(case.scenario), Registry.from_manager(manager)).under(case.policy, case.seed)
    if case.only is None:
        return loaded
    tenants = tuple(tenant for tenant in loaded.scenario.tenants if tenant.id == case.only)
    return replace(loaded, scenario=loaded.scenario.model_copy(update={"tenants": tenants}))


def run(case: Case) -> Figures:
    return Figures.of(simulate(prepared(case)))


class Runs:
    """Every case is begun at once, in order, and waited for when it is asked for."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
        self._futures: dict[Case, Future[Figures]] = {case: self._pool.submit(run, case) for case in cases}

    def __enter__(self) -> Runs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __call__(self, scenario: str, seed: int, policy: str | None = None, *, only: str | None = None) -> Figures:
        return self._futures[Case(scenario, seed, policy, only)].result()


def share_between(figures: Figures, tenant: str, start_s: float, end_s: float) -> float:
    """Its part of the service from one moment to another."""
    gained = figures.series.between(start_s, end_s)
    return float(gained[list(figures.run.ledger.tenants).index(tenant)] / gained.sum())


def two_turnovers(figures: Figures, from_s: float) -> float:
    """The time in which two running sequences finish, at its 95th percentile from ``from_s`` on."""
    ends = np.sort(np.concatenate([np.array(account.finishes) for account in figures.run.ledger.accounts]))
    ends = ends[ends >= from_s]
    return float(np.percentile(ends[2:] - ends[:-2], 95))


__all__ = ["Case", "Runs", "Use", "share_between", "two_turnovers"]
