"""``jwt_issuers``: tokens of several issuers, each with its own algorithms, audience, keys and claims.

Rules
- A token is verified by the rules and keys of the issuer that it names, and by no other's: a key of one issuer never
  verifies a token of another, and one provider that is down is nobody else's trouble.
- An issuer that is not listed is refused (401) without looking for any key.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from policies.auth._claims import claimed_issuer, presented
from policies.auth.jwt import JwtAuth, JwtConfig, make
from policies.spi import AuthError, PolicyConfig, PolicyConfigError, PolicyContext, PolicySpec
from policies.types import AuthRequest, Principal


class IssuersConfig(PolicyConfig):
    """The issuers: each entry takes what ``jwt`` takes."""

    issuers: tuple[JwtConfig, ...] = Field(min_length=1)


class IssuersAuth:
    """See the module's rules."""

    def __init__(self, issuers: Iterable[tuple[str, JwtAuth]]) -> None:
        self._issuers = dict(issuers)

    async def authenticate(self, request: AuthRequest) -> Principal:
        """Verify the bearer token. Raises AuthError or PolicyUnavailableError."""
        issuer = self._issuers.get(claimed_issuer(presented(request.bearer)) or "")
        if issuer is None:
            raise AuthError("unknown issuer")
        return await issuer.authenticate(request)


def _make(config: IssuersConfig, ctx: PolicyContext) -> IssuersAuth:
    made: dict[str, JwtAuth] = {}
    mistakes: list[tuple[str, str]] = []
    for index, entry in enumerate(config.issuers):
        path = f"issuers.{index}"
        if entry.issuer in made:
            mistakes.append((f"{path}.issuer", f"{entry.issuer!r} is listed twice; give one entry all its keys"))
            continue
        try:
            made[entry.issuer] = make(entry, ctx)
        except PolicyConfigError as error:
            mistakes += [(f"{path}.{inner}".rstrip("."), message) for inner, message in error.mistakes]
    if mistakes:
        raise PolicyConfigError(mistakes[0][1], mistakes[0][0], mistakes)
    return IssuersAuth(made.items())


SPEC = PolicySpec(
    "auth", "jwt_issuers", IssuersConfig, _make, "Signed tokens of several issuers, each by its own rules."
)
