"""Which pools may run a request at all, before any queue or routing: labels it requires, how far it may go. Pure.

Rules
- A tenant's and its class's ``requires`` are both kept; where they contradict each other nothing may run the request.
- A pool labelled ``external: "true"`` takes only what tenant and class both let out (``privacy.allow_external``).
- No configured pool may run it: 403 that names what is missing, whoever is up or down. Pools that may, but are down:
  503, or the queue. ``gate.takes`` keeps every later step (retry, another worker, a swapped policy) to the same pools.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway.errors import ApiError, forbidden
from gateway.settings import Model, Pool, ServiceClass
from policies.registry import Registry
from policies.types import EXTERNAL, Job

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request requires of a pool."""

    requires: Labels
    allow_external: bool
    contradiction: str | None = None
    """A label for which tenant and class require different values."""


def demand(requires: Labels, allow_external: bool, service_class: ServiceClass) -> Demand:
    """A tenant's and its class's requirements together."""
    both = {**service_class.requires, **requires}
    wrong = None
    if service_class.requires:
        wrong = next((key for key, value in service_class.requires.items() if both[key] != value), None)
    return Demand(both, allow_external and service_class.privacy.allow_external, wrong)


def unmet(labels: Collection[Labels], wanted: Demand) -> str | None:
    """What none of these pools offers, in words; None where one may run the request."""
    if wanted.contradiction is not None:
        return contradicted(wanted.contradiction)
    inside = [pool for pool in labels if wanted.allow_external or pool.get(EXTERNAL) != "true"]
    if any(_carries(pool, wanted.requires) for pool in inside):
        return None
    if any(_carries(pool, wanted.requires) for pool in labels):
        return "a pool inside this installation (privacy.allow_external is off)"
    missing = [
        f"{key}={value}" for key, value in wanted.requires.items() if not any(p.get(key) == value for p in inside)
    ]
    return ", ".join(missing) if missing else f"{', '.join(f'{k}={v}' for k, v in wanted.requires.items())} together"


def contradicted(label: str) -> str:
    """Nothing has two values of one label."""
    return f"{label}, for which tenant and class require different values"


def refusal(model: str, pools: Collection[Pool], job: Job) -> ApiError | None:
    """403 where no pool of the model may ever run ``job``."""
    if not job.requires:
        for pool in pools:
            if job.allow_external or pool.labels.get(EXTERNAL) != "true":
                return None
    missing = unmet([pool.labels for pool in pools], Demand(job.requires, job.allow_external))
    return None if missing is None else not_placed(model, missing)


def not_placed(model: str, missing: str) -> ApiError:
    """403 that names the unmet requirement."""
    return forbidden(
        f"Your tenant's requests need {missing}; no pool of the model {model[:128]!r} has that.",
        code="requirement_not_met",
        param="model",
    )


def with_labels(model: Model, registry: Registry) -> Model:
    """``model`` with the label that its launchers give pools: others' servers are external unless labelled."""
    pools = tuple(
        pool.model_copy(update={"labels": {EXTERNAL: "true", **pool.labels}})
        if registry.launcher(pool.launch.use).upstream
        else pool
        for pool in model.pools
    )
    return model.model_copy(update={"pools": pools})


def _carries(labels: Labels, requires: Labels) -> bool:
    return all(labels.get(key) == value for key, value in requires.items())
