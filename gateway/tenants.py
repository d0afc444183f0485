"""Who a verified tenant is here: its weight, class, limits and models, and the epoch of its caches.

Rules
- A tenant that the YAML lists gets what the YAML says; another one gets ``tenant_defaults``, or 403 without them.
- Snapshots are frozen: a request keeps the tenant it began with, also across a reload.
- An epoch only rises. It is part of every cache scope, so bumping it makes a tenant's cache unreachable at once; so is
  the window of its retention time (``retention.py``).
- Which scopes a tenant's requests used is remembered (``scopes.py``), so that a purge can name them to the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from gateway.access import Grant, least
from gateway.epochs import Epochs, window, window_end
from gateway.errors import forbidden
from gateway.scopes import PurgedLabels, ScopesInUse
from gateway.settings import Privacy, ServiceClass, Settings, Tenant, TenantDefaults
from gateway.settings_access import Narrowed
from policies.types import Limits, Principal, QuotaAccount, TenantId, TokenPrice

_UNLIMITED = Limits()

_WINDOW_BITS = 48


@dataclass(frozen=True, slots=True)
class EffectiveTenant:
    """One tenant as every step of a request sees it."""

    id: TenantId
    weight: float = 1.0
    service_class: str = "interactive"
    classes: Mapping[str, ServiceClass] = field(default_factory=dict)
    """All service classes by name: a request may lower its own class to one of them."""
    models: tuple[str, ...] = ("*",)
    """Names or shell patterns (``smol*``) of the models and adapters it may use."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Model → the adapter that its requests to it run with."""
    limits: Limits = field(default_factory=Limits)
    user_limits: Limits = field(default_factory=Limits)
    """Of each of its users."""
    key_limits: Limits = field(default_factory=Limits)
    """Of each of its credentials."""
    organisation: QuotaAccount | None = None
    """The account that it shares with other tenants."""
    cost_centre: str | None = None
    prices: Mapping[str, TokenPrice] = field(default_factory=dict)
    """By model."""
    grant: Grant = field(default_factory=lambda: Grant("Your tenant"))
    """What the tenant may ask for, but for models."""
    groups: Mapping[str, Grant] = field(default_factory=dict)
    users: Mapping[str, Grant] = field(default_factory=dict)
    grants: tuple[Grant, ...] = ()
    """What this caller may ask for: all of them have to allow it. Empty until the caller is known (``Tenants.of``)."""
    requires: Mapping[str, str] = field(default_factory=dict)
    privacy: Privacy = field(default_factory=Privacy)
    sample_ratio: float | None = None
    """Part of its requests whose traces are kept; None: the gateway's ratio."""
    epoch: int = 0
    window: int = 0
    """Of its retention time."""
    listed: bool = True
    """False for one that lives on ``tenant_defaults``."""

    @property
    def scope_epoch(self) -> int:
        """Epoch and window as one number: what cache scopes are made with."""
        return self.epoch << _WINDOW_BITS | self.window

    @property
    def cache_until(self) -> float:
        """Unix time at which its cache scopes end; 0: open."""
        return window_end(self.id, self.privacy.cache_retention_s, self.window)

    def may_use(self, model: str) -> bool:
        """Whether ``model`` is on the tenant's list."""
        return "*" in self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    def narrowed(self, principal: Principal) -> EffectiveTenant:
        """The tenant as this caller has it: narrowed by what its groups and the user may do at most."""
        narrower = [self.groups[name] for name in sorted(principal.groups & self.groups.keys())]
        if principal.user is not None and principal.user in self.users:
            narrower.append(self.users[principal.user])
        if not narrower:
            return replace(self, grants=(self.grant,))
        limits = replace(
            self.limits,
            max_output_tokens=least(self.limits.max_output_tokens, (grant.max_output_tokens for grant in narrower)),
            max_context_tokens=least(self.limits.max_context_tokens, (grant.max_context_tokens for grant in narrower)),
        )
        return replace(self, grants=(self.grant, *narrower), limits=limits)

    def accounts(self, principal: Principal) -> tuple[QuotaAccount, ...]:
        """Every account that a request of this caller counts against, the widest first."""
        own = QuotaAccount("tenant", self.id, self.id, self.limits)
        found = [self.organisation, own] if self.organisation is not None else [own]
        if principal.user is not None:
            found.append(QuotaAccount("user", self.id, principal.user, self.user_limits))
        if principal.key_id is not None and self.key_limits is not _UNLIMITED and self.key_limits != _UNLIMITED:
            found.append(QuotaAccount("key", self.id, principal.key_id, self.key_limits))
        return tuple(found)


class Tenants:
    """All tenants of one configuration, and the cache epochs, which outlive a reload."""

    def __init__(
        self, settings: Settings, epochs: Epochs | None = None, *, wall: Callable[[], float] = time.time
    ) -> None:
        """``wall``: Unix time, of which retention windows are made."""
        self._epochs = epochs or Epochs()
        self._wall = wall
        self._scopes = ScopesInUse()
        self.purged = PurgedLabels()
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Take the tenants, classes and defaults of ``settings``; epochs stay."""
        self._classes: Mapping[str, ServiceClass] = dict(settings.classes)
        self._organisations = {
            item.id: QuotaAccount("organisation", "", item.id, item.limits.to_limits())
            for item in settings.organisations
        }
        self._prices = {name: price.to_price() for name, price in settings.prices.models.items()}
        self._listed = {TenantId(tenant.id): self._effective(tenant.id, tenant) for tenant in settings.tenants}
        self._defaults = settings.tenant_defaults
        self._plain: dict[TenantId, EffectiveTenant] = {}
        """Listed tenants as callers have them that belong to no group and are no user with limits of their own."""

    def get(self, tenant: TenantId) -> EffectiveTenant:
        """The tenant's snapshot. Raises ApiError 403 for one that is not listed while there are no defaults."""
        found = self._listed.get(tenant)
        if found is None:
            if self._defaults is None:
                raise forbidden(
                    "Your tenant is not configured here. Ask the operator to list it, or to set tenant_defaults.",
                    code="unknown_tenant",
                )
            found = replace(self._effective(tenant, self._defaults), listed=False)
        return replace(found, epoch=self.epoch(tenant), window=self._window(tenant, found.privacy))

    def of(self, principal: Principal) -> EffectiveTenant:
        """The tenant of a verified caller, with what this caller may ask for. Raises as ``get``.

        Callers whom nothing narrows share one snapshot, for as long as it is the same.
        """
        tenant = principal.tenant
        own, known = self._listed.get(tenant), self._plain.get(tenant)
        if own is None or principal.user in own.users or not own.groups.keys().isdisjoint(principal.groups):
            return self.get(tenant).narrowed(principal)
        if known is None or known.epoch != self.epoch(tenant) or known.window != self._window(tenant, own.privacy):
            known = self._plain[tenant] = self.get(tenant).narrowed(principal)
        return known

    def knows(self, tenant: TenantId) -> bool:
        """Whether requests of ``tenant`` are served at all."""
        return tenant in self._listed or self._defaults is not None

    def listed(self) -> list[EffectiveTenant]:
        """Every tenant that the YAML names, in its order."""
        return [self.get(tenant) for tenant in self._listed]

    def names(self) -> list[TenantId]:
        """Every tenant that the YAML names, in its order, without their snapshots: for thousands of them."""
        return list(self._listed)

    def is_listed(self, tenant: TenantId) -> bool:
        """Whether the YAML names it."""
        return tenant in self._listed

    def weight(self, tenant: TenantId) -> float:
        """Its weight, or that of ``tenant_defaults``; 1 where neither is there."""
        found = self._listed.get(tenant) or self._defaults
        return found.weight if found is not None else 1.0

    def epoch(self, tenant: TenantId) -> int:
        """The current epoch of its caches."""
        return self._epochs.get(tenant)

    def scope_epoch(self, tenant: TenantId) -> int:
        """What its cache scopes are made with now (``EffectiveTenant.scope_epoch``)."""
        found = self._listed.get(tenant) or self._defaults
        privacy = found.privacy if found is not None else Privacy()
        return self.epoch(tenant) << _WINDOW_BITS | self._window(tenant, privacy)

    def used(self, tenant: EffectiveTenant, scope: bytes) -> None:
        """A request of ``tenant`` runs in this cache scope."""
        self._scopes.note(tenant.id, scope, tenant.scope_epoch)

    def with_scopes(self) -> list[TenantId]:
        """Tenants that have used a scope which may still hold something."""
        return self._scopes.tenants()

    def outdated(self, tenant: TenantId) -> list[bytes]:
        """Scopes of ``tenant`` whose epoch or window has ended and that were not swept yet."""
        return self._scopes.outdated(tenant, self.scope_epoch(tenant))

    def swept(self, tenant: TenantId, scopes: list[bytes]) -> None:
        """No worker holds anything of these any more."""
        self._scopes.swept(tenant, scopes)

    def bump(self, tenant: TenantId) -> tuple[int, list[bytes], bool]:
        """Start a new cache epoch for ``tenant``.

        Returns it, the scopes that its requests used until now, and whether these are all: some may be forgotten.
        """
        epoch = self._epochs.bump(tenant)
        return epoch, self._scopes.of(tenant), self._scopes.complete(tenant)

    async def save_epochs(self) -> None:
        """Write the epochs down, where there is a folder for them. Raises OSError."""
        await self._epochs.save()

    def _window(self, tenant: TenantId, privacy: Privacy) -> int:
        return window(tenant, privacy.cache_retention_s, self._wall())

    def _effective(self, tenant: str, config: Tenant | TenantDefaults) -> EffectiveTenant:
        return EffectiveTenant(
            id=TenantId(tenant),
            weight=config.weight,
            service_class=config.class_,
            classes=self._classes,
            models=config.models,
            adapters=dict(config.adapters),
            limits=config.limits.to_limits(),
            user_limits=config.user_limits.to_limits(),
            key_limits=_UNLIMITED if (of_keys := config.key_limits.to_limits()) == _UNLIMITED else of_keys,
            organisation=self._organisations[config.organisation] if config.organisation is not None else None,
            cost_centre=config.cost_centre,
            prices=self._prices,
            grant=Grant.of("Your tenant", _of_tenant(config)),
            groups={name: Grant.of(f"The group {name!r}", item) for name, item in config.groups.items()},
            users={name: Grant.of(f"The user {name!r}", item) for name, item in config.users.items()},
            requires=dict(config.requires),
            privacy=config.privacy,
            sample_ratio=config.sample_ratio,
        )


def _of_tenant(config: TenantDefaults) -> Narrowed:
    """Its classes and features; models are hidden rather than refused, and limits are its own."""
    return Narrowed(classes=config.classes, features=config.features)
