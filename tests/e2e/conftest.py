"""One server for all tests that do not harm it; the others start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import Server, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The real model, ready, until the last test of this folder; ``tests/order.py`` keeps its users together."""
    with serving(tmp_path_factory.mktemp("server")) as running:
        running.wait_ready()
        yield running
