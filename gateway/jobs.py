"""A request's job as far as it does not depend on its body: whose it is, its class and its deadline.

Identity, weight, class and limits come from the verified tenant. A caller may lower its class (``x-forebay-class``) and
loosen its deadline (``x-forebay-deadline-ms``); anything else it claims is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.access import class_refused
from gateway.adapters import Adapter
from gateway.placement import contradicted, demand, not_placed
from gateway.settings import ServiceClass
from gateway.tenants import EffectiveTenant
from policies.types import Job, JobId, Principal, TokenPrice


def make_job(principal: Principal, tenant: EffectiveTenant, model: str, job_id: JobId, now: float) -> Job:
    """A job without tokens. Raises ApiError 403 for a class that is not granted, or requirements that nothing meets."""
    return Job(prompt_tokens=0, max_tokens=0, **job_facts(principal, tenant, model, job_id, now))


def job_facts(
    principal: Principal,
    tenant: EffectiveTenant,
    model: str,
    job_id: JobId,
    now: float,
    headers: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """The fields of a request's job that do not depend on its body: all but tokens, keys and scope.

    Raises ApiError 403 for a class that is not granted, or requirements that nothing can meet.
    """
    name, service_class = _service_class(tenant, headers or {})
    wanted = demand(tenant.requires, tenant.privacy.allow_external, service_class)
    if wanted.contradiction is not None:
        raise not_placed(model, contradicted(wanted.contradiction))
    return {
        "id": job_id,
        "tenant": tenant.id,
        "model": model,
        "arrived_at": now,
        "weight": tenant.weight,
        "user": principal.user,
        "key_id": principal.key_id,
        "groups": principal.groups,
        "service_class": name,
        "priority": service_class.priority,
        "deadline": now + _deadline_s(service_class, headers or {}),
        "max_wait_s": service_class.max_wait_s,
        "requires": wanted.requires,
        "allow_external": wanted.allow_external,
        "limits": tenant.limits,
        "accounts": tenant.accounts(principal),
        "adapter": adapter.name if adapter is not None else None,
        "adapter_digest": adapter.digest if adapter is not None else None,
        "price": _price(tenant, model, adapter),
        "organisation": tenant.organisation.name if tenant.organisation is not None else None,
        "cost_centre": tenant.cost_centre,
    }


def _price(tenant: EffectiveTenant, model: str, adapter: Adapter | None) -> TokenPrice | None:
    """The adapter's own, by either of its names, or the model's."""
    if adapter is None or not tenant.prices:
        return tenant.prices.get(model)
    return next((tenant.prices[name] for name in (*adapter.names, model) if name in tenant.prices), None)


def _service_class(tenant: EffectiveTenant, headers: Mapping[str, str]) -> tuple[str, ServiceClass]:
    """The tenant's class, or the one it asks for when that is not above its own.

    A caller who may not have the tenant's own class gets the best one that it may have. Raises ApiError 403 for a class
    that is asked for and not granted, or where none is.
    """
    own = tenant.classes.get(tenant.service_class) or ServiceClass()
    wanted = headers.get("x-forebay-class", "")
    lower = tenant.classes.get(wanted)
    if lower is not None and lower.priority <= own.priority:
        if (refusal := class_refused(wanted, tenant.grants)) is not None:
            raise refusal
        return wanted, lower
    if (refusal := class_refused(tenant.service_class, tenant.grants)) is None:
        return tenant.service_class, own
    granted = [
        (found.priority, name)
        for name, found in tenant.classes.items()
        if found.priority <= own.priority and class_refused(name, tenant.grants) is None
    ]
    if not granted:
        raise refusal
    name = max(granted)[1]
    return name, tenant.classes[name]


def _deadline_s(service_class: ServiceClass, headers: Mapping[str, str]) -> float:
    """Seconds from arrival: what the class says, or later when the caller says so."""
    wanted = headers.get("x-forebay-deadline-ms")
    if wanted is None:
        return service_class.max_wait_s
    loosened = int(wanted) / 1000 if wanted.isascii() and wanted.isdigit() and len(wanted) <= 9 else 0.0
    return max(service_class.max_wait_s, loosened)
