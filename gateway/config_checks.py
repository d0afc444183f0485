"""What only shows when parts of the configuration are read together: names without a meaning, limits nothing can meet.

``problems`` needs nothing but the file and the registry: it also runs at start and at a reload. ``on_disk`` looks at
model files too, for `forebay config check`: a running gateway waits for files that are still on their way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gateway.access import Grant
from gateway.placement import demand, unmet, with_labels
from gateway.settings import Model, ServiceClass, Settings, TenantDefaults
from gateway.settings_adapters import could_be, known
from gateway.settings_quota import SharedLimits
from gateway.yaml_source import Mistake
from gateway.yaml_source import Path as Place
from policies.registry import Registry
from policies.spi import PolicyConfigError
from workers.adapters import AdapterError, folder_of
from workers.config import EngineConfig, kv_bytes_per_token
from workers.model_store import ModelStoreError, find

_GLOB = frozenset("*?[")
HANDED_OVER = ("block_size", "kv_dtype", "weight_dtype")
"""Settings of which two workers must have the same, or no block of one is any use to the other."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def problems(settings: Settings, registry: Registry) -> list[Mistake]:
    """Every mistake between sections."""
    return [
        *_names(settings),
        *_placement(settings, registry),
        *_times(settings, registry),
        *_outliving(settings),
        *_roles(settings),
        *_prices(settings),
    ]


def on_disk(settings: Settings, base_dir: Path) -> list[Mistake]:
    """Model sources, adapters and folders that are not there, and caches that hold less than one request."""
    found: list[Mistake] = []
    for i, model in enumerate(settings.models):
        if model.source is None:
            continue
        try:
            files = find(model.source, base_dir=base_dir)
        except ModelStoreError as error:
            found.append(Mistake(("models", i, "source"), str(error)))
            continue
        for j, pool in enumerate(model.pools):
            found += _beside(("models", i, "pools", j, "engine"), pool.engine, base_dir)
        if files is None:  # bundled, and not fetched yet
            continue
        for j, pool in enumerate(model.pools):
            if problem := _cache(files, pool.engine, model):
                found.append(Mistake(("models", i, "pools", j, "engine", "kv_cache"), problem))
    return found


def _beside(place: Place, engine: EngineConfig, base_dir: Path) -> Iterator[Mistake]:
    """What an engine needs beside its model."""
    for k, adapter in enumerate(engine.adapters):
        try:
            folder_of(adapter.source, base_dir)
        except AdapterError as error:
            yield Mistake((*place, "adapters", k, "source"), str(error))
    if engine.speculation is not None and engine.speculation.draft_model is not None:
        try:
            find(engine.speculation.draft_model, base_dir=base_dir)
        except ModelStoreError as error:
            yield Mistake((*place, "speculation", "draft_model"), str(error))
    if engine.disk_tier is not None:
        try:
            engine.disk_tier.folder(base_dir)
        except ValueError as error:
            yield Mistake((*place, "tiers", engine.tiers.index(engine.disk_tier), "path"), str(error))


def tenants(settings: Settings) -> Iterator[tuple[Place, TenantDefaults]]:
    """Every tenant of the file and the defaults, with their places."""
    for i, tenant in enumerate(settings.tenants):
        yield ("tenants", i), tenant
    if settings.tenant_defaults is not None:
        yield ("tenant_defaults",), settings.tenant_defaults


def _names(settings: Settings) -> Iterator[Mistake]:
    models = sorted(known(settings.models))
    for place, tenant in tenants(settings):
        yield from _adapters(place, tenant, settings.models)
        yield from _unknown((*place, "models"), tenant.models, models, "model", settings.models)
        yield from _unknown((*place, "classes"), tenant.classes or (), settings.classes, "class")
        for kind, entries in (("groups", tenant.groups), ("users", tenant.users)):
            for name, narrowed in entries.items():
                here = (*place, kind, name)
                yield from _unknown((*here, "models"), narrowed.models or (), models, "model", settings.models)
                yield from _unknown((*here, "classes"), narrowed.classes or (), settings.classes, "class")


def _unknown(
    place: Place, names: Iterable[str], there: Iterable[str], what: str, among: Iterable[Model] = ()
) -> Iterator[Mistake]:
    listed = list(there)
    for k, name in enumerate(names):
        if what == "model" and could_be(name, among):
            continue
        if name not in listed and not (what == "model" and _GLOB & set(name)):
            yield Mistake((*place, k), f"there is no {what} {name!r} (known: {', '.join(listed)})")


def _adapters(place: Place, tenant: TenantDefaults, models: Iterable[Model]) -> Iterator[Mistake]:
    """Adapters of a tenant's requests: of a model that is there, and known, or loaded later."""
    named = {model.name: model for model in models}
    for name, adapter in tenant.adapters.items():
        here = (*place, "adapters", name)
        if name not in named:
            yield Mistake(here, f"there is no model {name!r} (known: {', '.join(named)})")
        elif f"{name}:{adapter}" not in known([named[name]]) and not could_be(f"{name}:{adapter}", [named[name]]):
            yield Mistake(
                here,
                f"the model {name!r} has no adapter {adapter!r}, and none can be loaded: see engine.adapter_memory",
            )


def _placement(settings: Settings, registry: Registry) -> Iterator[Mistake]:
    try:
        models = [with_labels(model, registry) for model in settings.models]
    except PolicyConfigError:  # an unknown launcher, which is told already
        return
    for place, tenant in tenants(settings):
        service_class = settings.classes.get(tenant.class_, ServiceClass())
        if missing := homeless(tenant, service_class, models):
            yield Mistake((*place, "requires"), f"no pool of any model that it may use can run its requests: {missing}")


def homeless(tenant: TenantDefaults, service_class: ServiceClass, models: Iterable[Model]) -> str | None:
    """What no pool of any model that the tenant may use offers; None where one can run its requests."""
    grant = Grant("", models=tenant.models)
    wanted = demand(tenant.requires, tenant.privacy.allow_external, service_class)
    labels = [pool.labels for model in models if grant.may_use(model.name) for pool in model.pools]
    return unmet(labels, wanted) if labels else None


def _times(settings: Settings, registry: Registry) -> Iterator[Mistake]:
    times = settings.timeouts
    if times.first_token_s > times.total_s and "first_token_s" in times.model_fields_set:
        yield Mistake(
            ("timeouts", "first_token_s"),
            f"{times.first_token_s:g} is more than total_s ({times.total_s:g}), which ends the request before",
        )
    use = settings.policies.quota
    try:
        lease_s: Any = getattr(registry.validate("quota", use.use, use.with_), "lease_s", None)
    except PolicyConfigError:  # told already
        return
    if isinstance(lease_s, int | float) and lease_s < times.total_s:
        yield Mistake(
            ("policies", "quota", "with", "lease_s"),
            f"{lease_s:g} is less than timeouts.total_s ({times.total_s:g}): a request that runs so long loses its "
            "reservation; make it larger",
        )


def _outliving(settings: Settings) -> Iterator[Mistake]:
    """A cache on a disk outlives the gateway, so what was purged must be remembered as long."""
    if settings.state.path is not None:
        return
    for i, model in enumerate(settings.models):
        for j, pool in enumerate(model.pools):
            if pool.engine.disk_tier is not None:
                yield Mistake(
                    ("models", i, "pools", j, "engine", "tiers"),
                    "a tier of kind disk outlives the gateway, and so must the epochs of its purges: set state.path",
                )


def _prices(settings: Settings) -> Iterator[Mistake]:
    """Budgets in money that some model would never touch, since nobody said what it costs."""
    rich = {item.id for item in settings.organisations if item.limits.budget.currency_per_month is not None}
    for place, tenant in tenants(settings):
        where = next((name for name in ("limits", "user_limits") if _money(getattr(tenant, name))), None)
        if where is None and tenant.organisation not in rich:
            continue
        grant = Grant("", models=tenant.models)
        names = [model.name for model in settings.models if grant.may_use(model.name)]
        if unpriced := [name for name in names if name not in settings.prices.models]:
            inner: Place = ("organisation",) if where is None else (where, "budget", "currency_per_month")
            yield Mistake(
                (*place, *inner),
                f"a budget in money, but prices.models has no {unpriced[0]!r}, which the tenant may use without end; "
                "write its price there (input: 0 and output: 0 where it is free)",
            )


def _money(limits: SharedLimits) -> bool:
    return limits.budget.currency_per_month is not None


def _roles(settings: Settings) -> Iterator[Mistake]:
    """Prefill workers without anybody to compute for, decode workers for whom nobody does, and waits that a watchdog
    would end."""
    for i, model in enumerate(settings.models):
        if all(pool.engine.role == "prefill" for pool in model.pools):
            yield Mistake(
                ("models", i, "pools"),
                f"every pool of {model.name!r} has engine.role: prefill, and nobody would answer requests; give it a "
                "pool with role: decode",
            )
        elif not any(pool.launch.use == "static" for pool in model.pools):  # whose roles only their workers know
            yield from _unpaired(i, model)
        for j, pool in enumerate(model.pools):
            wait_s = pool.engine.transfer.timeout_s
            if pool.engine.role == "decode" and wait_s >= settings.timeouts.step_stall_s:
                yield Mistake(
                    ("models", i, "pools", j, "engine", "transfer", "timeout_s"),
                    f"{wait_s:g} is not less than timeouts.step_stall_s ({settings.timeouts.step_stall_s:g}): a worker "
                    "that waits so long for blocks would pass for stalled; lower it",
                )


def _unpaired(i: int, model: Model) -> Iterator[Mistake]:
    """Pools that would hand prompts over, or take them, and find nobody to do so with."""
    for j, pool in enumerate(model.pools):
        role = pool.engine.role
        if role == "both":
            continue
        other, what = ("decode", "computes prompts for") if role == "prefill" else ("prefill", "takes prompts from")
        place: Place = ("models", i, "pools", j, "engine")
        others = [one.engine for one in model.pools if one.engine.role == other]
        if not others:
            yield Mistake(
                (*place, "role"),
                f"{role} {what} pools with role: {other}, and {model.name!r} has none; add one, or write role: both",
            )
        elif unequal := next((name for name in HANDED_OVER if _none_like(pool.engine, others, name)), None):
            there = " and ".join(sorted({str(getattr(one, unequal)) for one in others}))
            yield Mistake(
                (*place, unequal),
                f"{getattr(pool.engine, unequal)} here and {there} where the role is {other}: blocks are handed over "
                "between equal settings only; write the same in both, or role: both",
            )


def _none_like(engine: EngineConfig, others: Iterable[EngineConfig], name: str) -> bool:
    value = getattr(engine, name)
    return all(getattr(one, name) != value for one in others)


def _cache(directory: Path, engine: EngineConfig, model: Model) -> str | None:
    """What is wrong with the size of a pool's cache for the model in ``directory``; None where it is not known."""
    try:
        config = json.loads((directory / "config.json").read_text())
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        layers = int(config["num_hidden_layers"])
        if min(kv_heads, head_dim, layers) < 1:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
        return None
    size = _BYTES.get(engine.dtype, 2)  # auto: at least two
    block = engine.block_size * kv_bytes_per_token(layers, kv_heads, head_dim, size, engine.kv_dtype)
    blocks = engine.blocks if engine.blocks is not None or engine.kv_cache == "auto" else engine.kv_cache // block
    if blocks is None:
        return None
    tokens = blocks * engine.block_size
    need = model.default_max_tokens + engine.block_size
    if tokens >= need:
        return None
    return (
        f"holds {tokens} tokens of this model ({block} bytes per block of {engine.block_size}), less than an answer of "
        f"default_max_tokens ({model.default_max_tokens}) with a prompt; give it at least "
        f"{-(-need // engine.block_size) * block} bytes"
    )
