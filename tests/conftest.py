"""What concerns the suite as a whole (README.md): order, what is prepared meanwhile, what is run again."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import again, kernels, order

# Before anything loads torch or numpy: threads of several processes that share two cores mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example took says what else the machine did. Set here, before any test module makes its settings.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that hands out the files to others compiles the kernel for all of them."""
    if session.config.getoption("dist", "no") != "no":
        kernels.start_building(session.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the processes that share the suite; one alone runs it as it was collected."""
    if hasattr(config, "workerinput"):
        order.sort(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, with files that share a server kept together."""
    return order.scheduler(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A test of real processes gets a second try."""
    return again.protocol(item, nextitem)


def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """Its first one has a name of its own."""
    return again.status(report)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """And is printed."""
    again.summary(terminalreporter)
