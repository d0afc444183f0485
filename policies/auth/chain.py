"""``chain``: several ways to authenticate, tried in order; the first that accepts wins.

When none accepts: unavailable (503) if any of them could not tell, else refused (401). A failing policy never lets
anybody in, and does not keep a later one from accepting.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from pydantic import Field

from policies.spi import (
    AuthError,
    AuthPolicy,
    Lifecycle,
    PolicyConfig,
    PolicyConfigError,
    PolicyContext,
    PolicySpec,
    PolicyUnavailableError,
)
from policies.types import AuthRequest, Principal


class Link(PolicyConfig):
    """One policy: ``{use: name, with: {...}}``."""

    use: str
    with_: dict[str, Any] = Field(default_factory=dict, alias="with")


class ChainConfig(PolicyConfig):
    """The policies, in order."""

    policies: tuple[Link, ...] = Field(min_length=1)


class ChainAuth:
    """See the module's rules."""

    def __init__(self, policies: Sequence[AuthPolicy]) -> None:
        self._policies = tuple(policies)

    async def start(self) -> None:
        """Start those that have a lifecycle. Raises what one of them raises."""
        for policy in self._policies:
            if isinstance(policy, Lifecycle):
                await policy.start()

    async def close(self) -> None:
        """Close them, last first; one that fails keeps no other from being closed."""
        async with AsyncExitStack() as stack:
            for policy in self._policies:
                if isinstance(policy, Lifecycle):
                    stack.push_async_callback(policy.close)

    async def authenticate(self, request: AuthRequest) -> Principal:
        """The first principal. Raises AuthError or PolicyUnavailableError."""
        unavailable: PolicyUnavailableError | None = None
        reasons: list[str] = []
        for policy in self._policies:
            try:
                return await policy.authenticate(request)
            except AuthError as error:
                reasons.append(str(error))
            except PolicyUnavailableError as error:
                unavailable = unavailable or error
            except Exception as error:  # any other failure is "could not tell"
                unavailable = unavailable or PolicyUnavailableError(f"{type(policy).__name__}: {type(error).__name__}")
        if unavailable is not None:
            raise unavailable
        raise AuthError("; ".join(reasons))


def _make(config: ChainConfig, ctx: PolicyContext) -> ChainAuth:
    if ctx.build is None:
        raise PolicyConfigError("chain needs a registry to build its policies", "policies")
    built: list[AuthPolicy] = []
    mistakes: list[tuple[str, str]] = []
    for index, link in enumerate(config.policies):
        try:
            built.append(ctx.build("auth", link.use, link.with_))
        except PolicyConfigError as error:
            mistakes += [(f"policies.{index}.{path}".rstrip("."), message) for path, message in error.mistakes]
    if mistakes:
        raise PolicyConfigError(mistakes[0][1], mistakes[0][0], mistakes)
    return ChainAuth(built)


SPEC = PolicySpec("auth", "chain", ChainConfig, _make, "Tries several auth policies in order; the first that accepts.")
