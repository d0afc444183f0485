"""Asking the policies that may say no: auth, admission, quota. Each has a time budget and fails closed.

Rules
- A policy that raises anything but its own refusal, or overruns ``policy_s``, is 503 with Retry-After: never a pass.
- A refusal says what the caller can do about it: 401, 429 with a Retry-After that works, 400 for what never passes.
- Who is let in has names that can be stored and shown, whichever policy verified them: a tenant, user, group or role
  with a control character or half a character (JSON has both, a signature does not mind) would break the ledger's
  file, reports and pages for everybody, and one that turns the text around would pass for another in them. Such a
  credential is 401.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import Scope

from gateway import log
from gateway.dispatch import Dispatcher
from gateway.errors import ApiError, bad_request, no_worker, shed, throttled, unauthenticated, unavailable
from gateway.http.middleware import request_id
from gateway.monitor import Monitor
from gateway.runtime import PolicySet
from gateway.strangers import Strangers
from gateway.timed import unwrap
from gateway.within import within
from policies.spi import AccountsElsewhere, AuthError, KeyClaim, PolicyUnavailableError, QuotaAccounts, SharedKeys
from policies.types import AdmissionDecision, AuthRequest, Job, LimitStatus, Principal, QuotaAccount, QuotaDecision

_log = log.get("policies")
_JOINED = "forebay.headers"
T = TypeVar("T")

MAX_TENANT_CHARS = 128
MAX_NAME_CHARS = 512
"""Of users, groups and roles: what the admin API can name."""
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line ends, what turns the direction of text around (a name would show as another), surrogates."""


class Gatekeeper:
    """Calls the policies of a request's ``PolicySet``."""

    def __init__(
        self, *, budget_s: float, monitor: Monitor, clock: Callable[[], float], strangers: Strangers | None = None
    ) -> None:
        self.budget_s = budget_s
        """Seconds that one auth or quota call may take. May be changed at any time."""
        self._monitor = monitor
        self._clock = clock
        self.strangers = strangers if strangers is not None else Strangers(None)

    async def authenticate(self, scope: Scope, policies: PolicySet) -> Principal:
        """The verified caller. Raises ApiError 401, 503."""
        headers, peer = joined_headers(scope), peer_of(scope)
        request = AuthRequest(headers, peer, _repeated(scope, headers))
        try:
            asked = policies.auth.authenticate(request)
            principal = await self._within("auth", policies.uses["auth"].use, asked)
            check_names(principal)
        except AuthError as error:
            _log.info("unauthenticated", request_id=request_id(scope), why=str(error))
            self.strangers.bad(peer)
            raise unauthenticated() from None
        self.strangers.good(peer)
        return principal

    def admission(self, job: Job, policies: PolicySet, dispatcher: Dispatcher) -> AdmissionDecision:
        """What admission says. Raises ApiError 503."""
        try:
            return policies.admission.check(job, dispatcher.view(job), self._clock())
        except Exception as error:
            raise self._closed("admission", policies.uses["admission"].use, error, 1.0) from error

    async def reserve(self, job: Job, policies: PolicySet) -> QuotaDecision:
        """What quota says; an admitted job holds a reservation. Raises ApiError 503."""
        asked = policies.quota.reserve(job, self._clock())
        decision = await self._within("quota", policies.uses["quota"].use, asked)
        self._monitor.quota(job, decision)
        return decision

    async def claim(self, name: str, body: str, policies: PolicySet) -> KeyClaim:
        """Whose an idempotency key is, where several gateways have one ledger. Raises ApiError 503."""
        quota = unwrap(policies.quota)
        if not isinstance(quota, SharedKeys):
            return "ours"
        return await self._within("quota", policies.uses["quota"].use, quota.claim(name, body, self._clock()))

    async def limits(self, accounts: tuple[QuotaAccount, ...], policies: PolicySet) -> list[LimitStatus]:
        """Every limit of these accounts, with what is left; none where none are kept. Raises ApiError 503."""
        quota = unwrap(policies.quota)
        if isinstance(quota, AccountsElsewhere):
            asked = quota.look_up(accounts, self._clock())
            return await self._within("quota", policies.uses["quota"].use, asked)
        return quota.status(accounts, self._clock()) if isinstance(quota, QuotaAccounts) else []

    async def _within(self, kind: str, name: str, asked: Coroutine[Any, Any, T]) -> T:
        """What a policy answers within its budget. Raises AuthError, which is an answer, and ApiError 503."""
        try:
            return await within(self.budget_s, asked)
        except AuthError as error:
            if kind == "auth":
                raise
            raise self._closed(kind, name, error, 1.0) from error
        except PolicyUnavailableError as error:
            raise self._closed(kind, name, error, error.retry_after_s) from None
        except Exception as error:
            raise self._closed(kind, name, error, 1.0) from error

    def _closed(self, kind: str, name: str, cause: Exception, retry_after_s: float) -> ApiError:
        self._monitor.fault(kind)
        _log.error("policy_failed", kind=kind, policy=name, failure=log.describe(cause))
        return unavailable(f"The {kind} service is not available. Retry later.", f"{kind}_unavailable", retry_after_s)


def check_names(principal: Principal) -> None:
    """Raises AuthError for names that cannot be stored or shown (see the module's rules)."""
    if not 0 < len(principal.tenant) <= MAX_TENANT_CHARS:
        raise AuthError(f"the tenant's name has {len(principal.tenant)} characters, not 1 to {MAX_TENANT_CHARS}")
    named = (("tenant", principal.tenant), ("user", principal.user or ""))
    for what, name in (
        *named,
        *(("group", name) for name in principal.groups),
        *(("role", name) for name in principal.roles),
    ):
        if len(name) > MAX_NAME_CHARS:
            raise AuthError(f"a {what}'s name has {len(name)} characters, more than {MAX_NAME_CHARS}")
        if not name.isprintable() and _UNFIT.search(name):
            raise AuthError(f"a {what}'s name has a control character, or half a character")


def not_admitted(job: Job, decision: AdmissionDecision, dispatcher: Dispatcher) -> ApiError:
    """429 of a busy queue, or 503 where nobody works it off."""
    if not dispatcher.ready_for(job):
        return no_worker(job.model)
    reason = decision.reason or "not_admitted"
    return shed("The queue has no room for this request now. Retry later.", reason, decision.retry_after_s)


def over_quota(decision: QuotaDecision) -> ApiError:
    """429 that passes later, or 400 for a request that never will."""
    limit, level = decision.limit or "quota", decision.level or "tenant"
    if decision.never:
        text = decision.message or f"It costs {decision.cost}, which is more than the whole limit {limit}."
        return bad_request(f"The request can never pass your {level}'s limits. {text}", code=f"{limit}_exceeded")
    return throttled(
        f"Your {level}'s limit {limit} is reached. Retry after the time in Retry-After.", limit, decision.retry_after_s
    )


def peer_of(scope: Scope) -> str | None:
    """The address at the other end of the connection."""
    client = scope.get("client")
    return client[0] if client else None


def _repeated(scope: Scope, joined: Mapping[str, str]) -> frozenset[str]:
    """Names of headers that came more than once."""
    if len(scope["headers"]) == len(joined):
        return frozenset()
    counts = Counter(name.decode("latin-1") for name, _ in scope["headers"])
    return frozenset(name for name, count in counts.items() if count > 1)


def joined_headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name; repeated ones joined, so that two credentials are none. Made once per request."""
    known: dict[str, str] | None = scope.get(_JOINED)
    if known is not None:
        return known
    joined: dict[str, str] = scope.setdefault(_JOINED, {})
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        joined[key] = f"{joined[key]}, {text}" if key in joined else text
    return joined
