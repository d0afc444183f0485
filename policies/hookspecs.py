"""The five hooks. They are synchronous and only register or observe; the objects they register do the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policies.spi import LauncherSpec, ModelSpec, PolicySpec, hookspec
from policies.types import JobEvent


@hookspec
def forebay_policies() -> list[PolicySpec]:  # type: ignore[empty-body]
    """Register policies. Called once at start; a duplicate (kind, name) stops the start."""


@hookspec
def forebay_launchers() -> list[LauncherSpec]:  # type: ignore[empty-body]
    """Register ways to start workers."""


@hookspec
def forebay_models() -> list[ModelSpec]:  # type: ignore[empty-body]
    """Register model architectures as ``module:attribute`` strings."""


@hookspec(firstresult=True)
def forebay_tenant_from_claims(claims: Mapping[str, Any]) -> str | None:
    """Map verified token claims to a tenant id; the first plugin that answers other than None wins."""


@hookspec
def forebay_job_event(event: JobEvent) -> None:
    """Observe one transition of a job. An observer that raises is skipped and counted; it never fails a request."""
