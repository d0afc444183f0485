"""The plugin is imported from its own folder; ``test_packaging.py`` installs it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT

sys.path.insert(0, str(ROOT / "plugins" / "openai_upstream"))

import forebay_openai_upstream as plugin

from tests.gateway.harness import Site, running

Front = Callable[..., AbstractAsyncContextManager[Site]]


def model(*pools: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The ``models`` entry: upstreams only, so without a source."""
    return {"name": "echo", "pools": list(pools), **more}


def upstream(url: str, name: str = "far", **settings: Any) -> dict[str, Any]:
    """One pool with one upstream."""
    return {"name": name, "launch": {"use": "openai_upstream", "with": {"url": url, **settings}}}


@pytest.fixture
def front(tmp_path: Path) -> Front:
    """``async with front(url, max_running=…) as site``: a gateway whose only worker is the server at ``url``."""

    @contextlib.asynccontextmanager
    async def starting(
        url: str = "",
        *,
        pools: list[dict[str, Any]] | None = None,
        changes: dict[str, Any] | None = None,
        **settings: Any,
    ) -> AsyncIterator[Site]:
        options = {name: settings.pop(name) for name in ("env", "ready", "echo") if name in settings}
        tenants = [{"id": name, "privacy": {"allow_external": True}} for name in ("alpha", "beta")]
        given = {
            "tenants": tenants,
            "models": [model(*(pools or [upstream(url, **settings)]))],
            **(changes or {}),
        }
        async with running(tmp_path, given, plugins=[plugin], **options) as site:
            yield site

    return starting
