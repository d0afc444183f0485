"""A test of real processes or of the real clock that fails is run a second time, and the summary says so.

Rules
- Once, from the ground up: every fixture is torn down before, shared ones too.
- Only tests in ``PLACES`` whose module reaches for something in ``REAL``: they depend on what else the machine does;
  on two busy cores a pause of a second is nobody's fault. A test that computes is never run again.
- What the failed try left open is freed before the second one: found later it would fail whatever test runs then.
- Nothing is hidden. The first failure is printed whole under "failed, then passed", and the last line counts it. One
  that appears there often has a bound that is too short, or meets a race of ours: it is to be mended.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
import warnings
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

PLACES = (
    "tests/arch/",
    "tests/e2e/",
    "tests/gateway/",
    "tests/plugins/",
    "tests/policies/quota/",
    "tests/policies/scheduling/test_processes",
    "tests/policies/test_meta",
    "tests/workers/launchers/",
    "tests/workers/model/parallel/",
    "tests/workers/rpc/",
    "tests/workers/test_",
    "tests/workers/transfer/",
)
COMPUTING = ("tests/workers/model/", "tests/workers/engine/", "tests/deploy/")
"""Where a process is started to compute in it, or the tests take minutes: no second try outside ``PLACES``."""
REAL = frozenset(
    {
        *("Site", "Start", "Server", "Serve", "WorkerServer", "OtlpReceiver", "running", "serving", "driving"),
        *("subprocess", "signal", "psutil", "socket", "GrammarCheck", "HttpClient", "fetch_json"),
    }
)
"""Names of a test module: listeners, processes, and what talks to them."""
AGAIN = "again"


def may_run_again(item: pytest.Item) -> bool:
    """Whether processes or the clock may have failed it."""
    module = getattr(item, "module", None)
    return item.nodeid.startswith(PLACES) and not REAL.isdisjoint(vars(module) if module else ())


def protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """``pytest_runtest_protocol``: None leaves the test to pytest."""
    if not may_run_again(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if failed := [report for report in reports if report.failed]:
        failed[-1].sections += _end_fixtures(item)
        for report in failed:
            report.outcome = AGAIN  # type: ignore[assignment]
            item.ihook.pytest_runtest_logreport(report=report)
        _free_what_it_left()
        item._initrequest()  # type: ignore[attr-defined]
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _end_fixtures(item: pytest.Item) -> list[tuple[str, str]]:
    """Tear down those that other tests share, too; what fails there is told with the test's failure."""
    try:
        item.session._setupstate.teardown_exact(None)
    except (Exception, pytest.fail.Exception):
        return [("teardown of shared fixtures", traceback.format_exc())]
    return []


def _free_what_it_left() -> None:
    """Sockets that its frames hold, and files: pytest keeps the traceback until the next test begins."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        with contextlib.suppress(AttributeError):
            delattr(sys, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def status(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """``pytest_report_teststatus`` of a first failure."""
    return (AGAIN, "A", "AGAIN") if report.outcome == AGAIN else None  # type: ignore[comparison-overlap]


def summary(reporter: Any) -> None:
    """First failures, whole."""
    failed = {report.nodeid for category in ("failed", "error") for report in reporter.stats.get(category, [])}
    for report in reporter.stats.get(AGAIN, []):
        ended = "failed twice" if report.nodeid in failed else "failed, then passed"
        reporter.write_sep("=", f"{ended}: {report.nodeid} ({report.when})", yellow=True)
        for text in (report.longreprtext, *(text for _, text in report.sections)):
            reporter.write_line(text)
