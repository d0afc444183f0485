"""The conformance kit: what every policy, built-in or foreign, must pass. Needs nothing but the standard library.

    from policies.testing import SchedulingConformance

    class TestMine(SchedulingConformance):
        def make(self):
            return MyScheduler()

or, without a class, ``conformance("scheduling", MyScheduler)``. Each ``test_*`` method makes fresh objects and needs no
fixture. Class attributes state what a policy does not promise; everything else is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policies._conformance.base import Conformance, always, make_job
from policies._conformance.kinds import (
    AdmissionConformance,
    AuthConformance,
    CacheScopeConformance,
    QuotaConformance,
    RoutingConformance,
)
from policies._conformance.scheduling import SchedulingConformance
from policies.spi import Kind

SUITES: Mapping[Kind, type[Conformance]] = {
    "auth": AuthConformance,
    "quota": QuotaConformance,
    "cache_scope": CacheScopeConformance,
    "scheduling": SchedulingConformance,
    "routing": RoutingConformance,
    "admission": AdmissionConformance,
}


def suite(kind: Kind, factory: Callable[[], Any], **promises: Any) -> type[Conformance]:
    """The kind's suite for the objects of ``factory``; ``promises`` sets class attributes of the suite."""
    body = {name: staticmethod(value) if callable(value) else value for name, value in promises.items()}
    return type(f"{kind.title()}Suite", (SUITES[kind],), {"make": lambda self: factory(), **body})


def checks(kind: Kind) -> list[str]:
    """Names of the kind's checks."""
    return [name for name in dir(SUITES[kind]) if name.startswith("test_")]


def conformance(kind: Kind, factory: Callable[[], Any], **promises: Any) -> None:
    """Run the whole suite; raises AssertionError at the first promise that is not kept."""
    instance = suite(kind, factory, **promises)()
    for name in checks(kind):
        getattr(instance, name)()


__all__ = [
    "SUITES",
    "AdmissionConformance",
    "AuthConformance",
    "CacheScopeConformance",
    "Conformance",
    "QuotaConformance",
    "RoutingConformance",
    "SchedulingConformance",
    "always",
    "checks",
    "conformance",
    "make_job",
    "suite",
]
