"""The pages: which there are, and what each of them shows. A page is rendered whole, its live part once a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml
from starlette.datastructures import QueryParams

from gateway import policy_view
from gateway.console_data import ConsoleData
from gateway.console_requests import requests
from policies.spi import KINDS, Kind

if TYPE_CHECKING:
    from gateway.service import Gateway

Values = dict[str, Any]
MAX_QUERY = 128


@dataclass(frozen=True, slots=True)
class Page:
    """One entry of the navigation."""

    name: str
    """In the URL; the template of its live part is ``_<name>.html``."""
    title: str
    live: Callable[[Gateway, ConsoleData, QueryParams], Values]
    """What the live part shows."""
    still: Callable[[Gateway, QueryParams], Values] = lambda gateway, query: {}
    """What the rest shows."""
    charts: bool = False

    @property
    def path(self) -> str:
        """Its URL."""
        return "/console" if self.name == "overview" else f"/console/{self.name}"


def _overview(gateway: Gateway, data: ConsoleData, query: QueryParams) -> Values:
    return {"overview": data.overview()}


def _tenants(gateway: Gateway, data: ConsoleData, query: QueryParams) -> Values:
    view = data.tenants(_text(query, "q"))
    return {
        "rows": view.rows,
        "more": view.total - len(view.rows),
        "unlisted": gateway.settings.tenant_defaults is not None,
    }


def _search(gateway: Gateway, query: QueryParams) -> Values:
    return {"q": _text(query, "q")}


def _workers(gateway: Gateway, data: ConsoleData, query: QueryParams) -> Values:
    return {"rows": data.workers()}


def _requests(gateway: Gateway, data: ConsoleData, query: QueryParams) -> Values:
    return {"view": requests(gateway), "linked": gateway.settings.telemetry.jaeger_ui is not None}


def _policies(gateway: Gateway, data: ConsoleData, query: QueryParams) -> Values:
    runtime = gateway.parts.runtime
    current, trial = runtime.current, runtime.trial
    return {
        "rows": policy_view.live(current, gateway.parts.registry),
        "generation": current.generation,
        "chosen": _kind(query),
        "fallbacks": current.fallbacks,
        "trial": None if trial is None else {"use": trial.use.use, "running": trial.running, **trial.as_json()},
    }


def _swap_form(gateway: Gateway, query: QueryParams) -> Values:
    kind = _kind(query)
    parts = gateway.parts
    if kind is None:
        return {"form": None}
    use = parts.runtime.current.uses[kind]
    settings = policy_view.without_secrets(use.with_)
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, default_flow_style=False) if settings else ""
    return {
        "form": {
            "kind": kind,
            "use": use.use,
            "text": text,
            "mask": policy_view.MASK,
            "masked": policy_view.MASK in text,
            "choices": policy_view.choices(parts.registry, kind),
        }
    }


def _text(query: QueryParams, name: str) -> str:
    return query.get(name, "")[:MAX_QUERY]


def _kind(query: QueryParams) -> Kind | None:
    kind = query.get("kind", "")
    return kind if kind in KINDS else None


PAGES: Mapping[str, Page] = {
    page.name: page
    for page in (
        Page("overview", "Overview", _overview, charts=True),
        Page("tenants", "Tenants", _tenants, _search),
        Page("workers", "Workers", _workers),
        Page("requests", "Requests", _requests),
        Page("policies", "Policies", _policies, _swap_form),
    )
}
