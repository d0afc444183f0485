"""A request's job as far as it does not depend on its body: whose it is, its class and its deadline.

Identity, weight, class and limits come from the verified tenant. A caller may lower its class (``x-forebay-class``) and
loosen its deadline (``x-forebay-deadline-ms``); anything else it claims is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.settings import ServiceClass
from gateway.tenants import EffectiveTenant
from policies.types import Job, JobId, Principal


def make_job(
    principal: Principal,
    tenant: EffectiveTenant,
    model: str,
    job_id: JobId,
    now: float,
    headers: Mapping[str, str] | None = None,
) -> Job:
    """The job of a request as far as it does not depend on its body: no tokens."""
    name, service_class = _service_class(tenant, headers or {})
    return Job(
        id=job_id,
        tenant=tenant.id,
        model=model,
        prompt_tokens=0,
        max_tokens=0,
        arrived_at=now,
        weight=tenant.weight,
        user=principal.user,
        key_id=principal.key_id,
        groups=principal.groups,
        service_class=name,
        priority=service_class.priority,
        deadline=now + _deadline_s(service_class, headers or {}),
        max_wait_s=service_class.max_wait_s,
        requires=tenant.requires,
        limits=tenant.limits,
        accounts=tenant.accounts(principal),
        price=tenant.prices.get(model),
        organisation=tenant.organisation.name if tenant.organisation is not None else None,
        cost_centre=tenant.cost_centre,
    )


def _service_class(tenant: EffectiveTenant, headers: Mapping[str, str]) -> tuple[str, ServiceClass]:
    """The tenant's class, or the one it asks for when that is not above its own."""
    own = tenant.classes.get(tenant.service_class) or ServiceClass()
    wanted = headers.get("x-forebay-class", "")
    lower = tenant.classes.get(wanted)
    if lower is not None and lower.priority <= own.priority:
        return wanted, lower
    return tenant.service_class, own


def _deadline_s(service_class: ServiceClass, headers: Mapping[str, str]) -> float:
    """Seconds from arrival: what the class says, or later when the caller says so."""
    wanted = headers.get("x-forebay-deadline-ms", "")
    loosened = int(wanted) / 1000 if wanted.isascii() and wanted.isdigit() and len(wanted) <= 9 else 0.0
    return max(service_class.max_wait_s, loosened)
