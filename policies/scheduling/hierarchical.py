"""``hierarchical``: tenants share by one policy, each tenant's users or keys share that by another.

Source: hierarchical fair queueing (Bennett, Zhang, "Hierarchical Packet Fair Queueing Algorithms", SIGCOMM 1996), with
any two scheduling policies of the registry.

Rules
- The outer policy decides between tenants. Each tenant has an inner policy of its own, which sees the members (users or
  keys) as its tenants, with their own weights (``_members.py``). A tenant that splits its work over many members gains
  nothing: its share is the outer policy's business, which knows no members.
- Which job of a tenant runs is the inner policy's choice alone. How the two are joined: ``_levels.py``.
- Giving up late jobs (``policies.spi.Expiring``) is the inner policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from policies.scheduling._levels import TwoLevels, levels
from policies.spi import PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec, SchedulingPolicy
from policies.strict import WEIGHTS
from policies.types import Job, TenantId


class Level(PolicyConfig):
    """One policy: ``{use: name, with: {...}}``."""

    use: str = "vtc"
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class HierarchicalConfig(PolicyConfig):
    """The two policies, what a tenant's members are, and their weights."""

    outer: Level = Level()
    inner: Level = Level()
    by: Literal["user", "key"] = "user"
    """What a member is. A job without a user counts by its key and the other way round; without both, they are one."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Member → weight within its tenant; 1 for the others."""


# Asked twice per job: without ``TenantId(...)``, which is a call.
def _by_user(job: Job) -> TenantId:
    return job.user or job.key_id or ""  # type: ignore[return-value]


def _by_key(job: Job) -> TenantId:
    return job.key_id or job.user or ""  # type: ignore[return-value]


def _make(config: HierarchicalConfig, ctx: PolicyContext) -> TwoLevels:
    if ctx.prepare is None:
        raise PolicyConfigError("hierarchical needs a registry to build its policies", "outer")
    mistakes: list[tuple[str, str]] = []
    for name, weight in config.weights.items():
        if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
            least, most = WEIGHTS
            mistakes.append((f"weights.{name}", f"must be between {least:g} and {most:g}, got {weight:g}"))
    made: dict[str, tuple[SchedulingPolicy, Callable[[], SchedulingPolicy]]] = {}
    for level, use in (("outer", config.outer), ("inner", config.inner)):
        if use.use == "hierarchical":
            mistakes.append((f"{level}.use", "hierarchical has two levels only; name another policy"))
            continue
        try:
            make = ctx.prepare("scheduling", use.use, use.with_)
            made[level] = (make(), make)
        except PolicyConfigError as error:
            mistakes += [(f"{level}.{path}".rstrip("."), message) for path, message in error.mistakes]
    if mistakes:
        raise PolicyConfigError(mistakes[0][1], mistakes[0][0], mistakes)

    member = _by_user if config.by == "user" else _by_key
    weights = {TenantId(name): weight for name, weight in config.weights.items()}
    return levels(made["outer"][0], made["inner"][1], member, weights)


SPEC = PolicySpec(
    "scheduling",
    "hierarchical",
    HierarchicalConfig,
    _make,
    "Tenants share by one policy, each tenant's users or keys by another.",
)
