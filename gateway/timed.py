"""Policies with a stopwatch: the time inside each deciding call goes to ``forebay_policy_seconds``.

A wrapper delegates everything it does not time, so a policy may have methods of its own; ``unwrap`` gives it back.
Accounting calls (``charge``, ``push`` …) run per token or job and are cheap by contract: timing them would cost more.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from policies.spi import Kind

Observe = Callable[[float], None]

TIMED: Mapping[Kind, tuple[str, ...]] = {
    "auth": ("authenticate",),
    "quota": ("reserve", "settle"),
    "cache_scope": ("scope",),
    "scheduling": ("pop",),
    "routing": ("choose",),
    "admission": ("check",),
}
PASSED: Mapping[Kind, tuple[str, ...]] = {"scheduling": ("push", "charge", "explain", "discard", "requeue")}
"""What is called several times a request: found here, where all else is looked for here first."""
_ASYNC: frozenset[Kind] = frozenset({"auth", "quota"})


class Timed:
    """One policy behind its stopwatch."""

    def __init__(self, kind: Kind, policy: Any, observe: Observe) -> None:
        self.wrapped = policy
        wrap = _async if kind in _ASYNC else _sync
        for name in TIMED[kind]:
            setattr(self, name, wrap(getattr(policy, name), observe))
        for name in PASSED.get(kind, ()):
            if (call := getattr(policy, name, None)) is not None:
                setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def __len__(self) -> int:
        return len(self.wrapped)


def unwrap(policy: Any) -> Any:
    """The policy itself."""
    return policy.wrapped if isinstance(policy, Timed) else policy


def _sync(call: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            observe(time.perf_counter() - start)

    return timed


def _async(call: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    @functools.wraps(call)
    async def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return await call(*args, **kwargs)
        finally:
            observe(time.perf_counter() - start)

    return timed
