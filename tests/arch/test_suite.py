"""How the suite runs itself: the order of files, names that hold everywhere, the second try of real processes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import again, ids, order
from tests.arch.source import ROOT

NOW = 1_800_000_000.0

CONFTEST = """
from tests.again import protocol as pytest_runtest_protocol
from tests.again import status as pytest_report_teststatus
from tests.again import summary

def pytest_terminal_summary(terminalreporter):
    summary(terminalreporter)
"""
WARNINGS = """
[pytest]
filterwarnings =
    error::ResourceWarning
    error::pytest.PytestUnraisableExceptionWarning
"""
MODULE = """
import gc
import socket as sockets
import {library}
import pytest
tries, made = [], []

@pytest.fixture(scope="session")
def dear():
    made.append(1)
    yield
    assert len(made) != 2, "it does not end"

def test_once(dear):
    tries.append(1)
    left = [sockets.socket()]
    left.append(left)
    if len(tries) == 2:
        left[0].close()
    assert len(tries) == 2, "the machine stood still"

def test_broken(dear):
    assert False, "it never works"

def test_good():
    assert made == [1] * 3
    gc.collect()
"""


@pytest.mark.parametrize(
    "name",
    [
        f"test_a[{int(NOW)}]",
        f"test_a[exp-{int(NOW * 1000) + 5000}]",
        "test_a[<object at 0x7f3a5c1d2e80>]",
        "test_a[1b4e28ba-2fa1-41d2-883f-0016d3cca427]",
        "test_a[" + ".".join(["eyJhbGciOiJIUzI1NiJ9"] * 3) + "]",
    ],
    ids=["seconds", "milliseconds", "address", "uuid", "token"],
)
def test_a_name_that_another_process_would_not_give_is_found(name: str) -> None:
    assert ids.unstable([name], NOW) == [name]


def test_all_names_are_the_same_in_every_process(request: pytest.FixtureRequest) -> None:
    """Of what this run collected: the whole suite, if it is the whole suite. Parameters that need it get ``ids``."""
    assert ids.unstable(item.nodeid for item in request.session.items) == []


def test_other_names_pass() -> None:
    assert ids.unstable(["test_a[4294967296]", "test_a[0xff]", "test_a[mixed-16-prefix-tight-20]"], NOW) == []


def test_the_heaviest_files_come_first_and_what_shares_a_server_stays_together(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = [path for path, unit in order.UNITS.items() if unit == order.SHARED_SERVER][:2]
    monkeypatch.setattr(order, "SECONDS", {order.SHARED_SERVER: 60, "tests/slow.py": 30})
    many = [f"tests/many.py::test_{i}" for i in range(9)]
    computing = [f"tests/policies/{name}.py::a" for name in "abcd"]
    names = [*many, *computing, f"{first}::a", "tests/slow.py::a", "tests/b.py::a", "tests/a.py::a"]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in [*names, f"{second}::b", f"{first}::c"]]
    order.sort(items)
    ordered = [item.nodeid for item in items]
    assert sorted(ordered) == sorted([*names, f"{second}::b", f"{first}::c"])
    waiting = [name for name in ordered if name not in computing]
    assert waiting[:4] == [f"{first}::a", f"{second}::b", f"{first}::c", "tests/slow.py::a"]
    assert waiting[4:] == [*many, "tests/a.py::a", "tests/b.py::a"]
    places = [ordered.index(name) for name in computing]
    assert places == sorted(places)
    assert places[0] < 4 < places[2] < ordered.index(many[0]), "of both kinds some run all the time"


def test_the_files_whose_order_is_given_exist() -> None:
    named = {*order.UNITS, *order.SECONDS} - {order.SHARED_SERVER}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert order.SHARED_SERVER in order.SECONDS


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest says of the same tests in a place for processes, and as a module that starts none."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "pytest.ini").write_text(WARNINGS)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "tests/e2e").mkdir(parents=True)
    (folder / "tests/e2e/test_real.py").write_text(MODULE.format(library="subprocess"))
    (folder / "tests/e2e/test_pure.py").write_text(MODULE.format(library="math"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", "-rA", "."],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return done.stdout


def test_what_passes_the_second_time_is_passed_and_told_of(ran: str) -> None:
    assert "PASSED tests/e2e/test_real.py::test_once" in ran
    assert "failed, then passed: tests/e2e/test_real.py::test_once (call)" in ran
    assert "AssertionError: the machine stood still" in ran
    assert "2 again" in ran.splitlines()[-1]


def test_what_fails_twice_has_failed(ran: str) -> None:
    assert "FAILED tests/e2e/test_real.py::test_broken" in ran
    assert "failed twice: tests/e2e/test_real.py::test_broken (call)" in ran


def test_the_second_try_begins_with_new_fixtures(ran: str) -> None:
    """The shared one as well: it was made for the first test, again for its second try, and for the next one's."""
    assert "PASSED tests/e2e/test_real.py::test_good" in ran


def test_what_the_first_try_left_open_fails_no_other(ran: str) -> None:
    """A socket in a cycle, which would be found when a later test collects."""
    assert "PASSED tests/e2e/test_real.py::test_good" in ran
    assert "passed: tests/e2e/test_real.py::test_good" not in ran, "not even its first try"


def test_a_shared_fixture_that_fails_meanwhile_is_told_of(ran: str) -> None:
    assert "AssertionError: it does not end" in ran


def _names_of(path: Path) -> set[str]:
    """What a module imports and defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def test_what_talks_to_processes_is_where_a_second_try_is_given() -> None:
    """And no name is listed that no test module has any more."""
    real = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        real[path.relative_to(ROOT).as_posix()] = _names_of(path) & again.REAL
    places = (*again.PLACES, *again.COMPUTING)
    assert [name for name, found in sorted(real.items()) if found and not name.startswith(places)] == []
    assert set().union(*real.values()) == again.REAL
    assert [place for place in places if not any(name.startswith(place) for name in real)] == []


def test_no_example_fails_for_the_time_it_took() -> None:
    """A busy machine fails none of those that are made up; one that hangs ends with the test's own time."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_what_starts_no_process_is_not_tried_again(ran: str) -> None:
    assert "FAILED tests/e2e/test_pure.py::test_once" in ran
    assert "test_pure" not in "".join(line for line in ran.splitlines() if line.startswith("===") and "then" in line)
