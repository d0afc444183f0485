"""What is said between the gateway that keeps a ledger and those that ask it for quota: JSON arrays, one a line.

    asks    hello(version, client) · reserve(n, job, now) · settle(n, id, usage, cost, now)
            devices(n, batch, jobs, use) · status(n, accounts, now) · claim(n, name, body, now)
            started(id) · keep(name, until) · release(name) · ping()
    answers hello(version) · done(n, answer) · failed(n, text, retry_after_s) · refused(text) · pong()

``n`` numbers the questions of a connection, ``batch`` what a gateway tells of devices: one that is told again counts
once. ``now`` is the monotonic clock, which all processes of a machine share. Of
a job goes along what the books look at: who, which model, how much; nothing of its content, no key of a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from policies.quota.limits import accounts_of
from policies.types import (
    DeviceTime,
    DeviceUse,
    Job,
    JobId,
    Limits,
    LimitState,
    LimitStatus,
    QuotaAccount,
    QuotaDecision,
    TenantId,
    TokenPrice,
    Usage,
)

VERSION = 3
MAX_LINE = 1 << 18
"""Bytes; a job's accounts are a few hundred."""
_PLAIN = (
    "id",
    "tenant",
    "model",
    "prompt_tokens",
    "max_tokens",
    "arrived_at",
    "user",
    "key_id",
    "service_class",
    "adapter",
    "organisation",
    "cost_centre",
)
_LIMITS = frozenset(field.name for field in fields(Limits))


def socket_of(ledger: Path) -> Path:
    """Where the keeper of a ledger listens."""
    return ledger.with_suffix(ledger.suffix + ".sock")


def line(*message: Any) -> bytes:
    """One message."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def parsed(data: bytes) -> tuple[str, list[Any]]:
    """The name of a message and what follows it. Raises ValueError for what is none."""
    message = json.loads(data)
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ValueError("a message is an array that begins with its name")
    return message[0], message[1:]


def job_out(job: Job) -> dict[str, Any]:
    """What the books look at."""
    found = {name: value for name in _PLAIN if (value := getattr(job, name)) is not None}
    found["accounts"] = accounts_out(accounts_of(job))
    if job.price is not None:
        found["price"] = asdict(job.price)
    return found


def job_in(found: Mapping[str, Any]) -> Job:
    """The job again. Raises TypeError, KeyError, ValueError for what is none."""
    plain = {name: found[name] for name in _PLAIN if name in found}
    accounts = accounts_in(found["accounts"])
    price = TokenPrice(**found["price"]) if "price" in found else None
    plain |= {"id": JobId(plain["id"]), "tenant": TenantId(plain["tenant"])}
    return Job(**plain, accounts=accounts, price=price)


def accounts_out(accounts: Iterable[QuotaAccount]) -> list[Any]:
    """Whose they are, and their limits."""
    return [[account.level, account.tenant, account.name, _set(account.limits)] for account in accounts]


def accounts_in(found: Iterable[Any]) -> tuple[QuotaAccount, ...]:
    """The accounts again. Raises TypeError, ValueError for what are none."""
    return tuple(
        QuotaAccount(level, tenant, name, Limits(**{limit: int(limits[limit]) for limit in limits if limit in _LIMITS}))
        for level, tenant, name, limits in found
    )


def status_out(limits: Iterable[LimitStatus]) -> list[Any]:
    """Limits, with what is left."""
    return [asdict(limit) for limit in limits]


def status_in(found: Iterable[Any]) -> list[LimitStatus]:
    """The limits again."""
    return [LimitStatus(**limit) for limit in found]


def decision_out(decision: QuotaDecision) -> dict[str, Any]:
    """All of it."""
    return {**asdict(decision), "remaining": states_out(decision.remaining)}


def decision_in(found: Mapping[str, Any]) -> QuotaDecision:
    """The decision again."""
    return QuotaDecision(**{**found, "remaining": states_in(found["remaining"])})


def states_out(states: Mapping[str, LimitState]) -> dict[str, Any]:
    """What is left, by header."""
    return {name: asdict(state) for name, state in states.items()}


def states_in(found: Mapping[str, Any]) -> dict[str, LimitState]:
    """What is left again."""
    return {name: LimitState(**state) for name, state in found.items()}


def usage_out(usage: Usage) -> list[int]:
    """Prompt, cached, output."""
    return [usage.prompt, usage.cached, usage.output]


def devices_in(jobs: Mapping[str, Any], use: list[Any]) -> tuple[dict[JobId, DeviceTime], list[DeviceUse]]:
    """Device time, by job and in all."""
    return {JobId(name): DeviceTime(*spent) for name, spent in jobs.items()}, [DeviceUse(*item) for item in use]


def _set(limits: Limits) -> dict[str, int]:
    return {name: value for name, value in asdict(limits).items() if value is not None}
