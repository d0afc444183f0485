"""Fixtures of the gateway's tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.harness import Site, running

Start = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """``async with start({...settings}, echo=Echo(...)) as site``."""

    @contextlib.asynccontextmanager
    async def starting(changes: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Site]:
        async with running(tmp_path, changes, **options) as site:
            yield site

    return starting


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """One gateway for a whole module, as its ``SETTINGS`` and ``ECHO`` say; leave it at rest.

    The module's tests run in one loop: ``pytestmark = pytest.mark.asyncio(loop_scope="module")``.
    """
    module = request.module
    folder = tmp_path_factory.mktemp("gateway")
    async with running(folder, getattr(module, "SETTINGS", None), echo=getattr(module, "ECHO", None)) as site:
        yield site
