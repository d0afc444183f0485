"""Who may use the admin listener: the holder of the admin token, and operators with tokens of their own.

Rules
- Every token is compared, each in constant time, so that an answer's time tells nothing.
- Where the listener can be reached from elsewhere a token is too long to be guessed.
- Without any token the listener is for this machine only; where it could be reached from elsewhere, it does not start.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from gateway.settings import Admin
from policies.locality import is_loopback

ADMIN = "admin"
"""The name of whoever holds ``admin.token_env``'s token, in the audit log."""

MIN_CHARS = 16


class Operators:
    """Names by token."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._tokens = {name: token.encode() for name, token in tokens.items() if token}

    @classmethod
    def of(cls, admin: Admin, env: Mapping[str, str]) -> Operators:
        """As configured. Raises ValueError for a token that is missing, shared, or needed where there is none."""
        tokens = {ADMIN: _token(env, admin.token_env)}
        for name, variable in admin.operators.items():
            tokens[name] = _token(env, variable)
            if not tokens[name]:
                raise ValueError(f"admin.operators.{name}: the variable {variable} is not set; give it a token")
        given = [token for token in tokens.values() if token]
        if len(set(given)) < len(given):
            raise ValueError("admin.operators: two of them have the same token; who did what could not be told apart")
        if not given and not is_loopback(admin.host):
            raise ValueError(
                f"admin.host: {admin.host!r} can be reached from elsewhere; set the variable "
                f"{admin.token_env or 'that admin.token_env names'} to a token, or listen on 127.0.0.1"
            )
        short = [name for name, token in tokens.items() if token and len(token) < MIN_CHARS]
        if short and not is_loopback(admin.host):
            raise ValueError(
                f"admin: the token of {short[0]} has fewer than {MIN_CHARS} characters, and {admin.host!r} can be "
                "reached from elsewhere: it could be guessed; make one with: openssl rand -hex 32"
            )
        return cls(tokens)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def name_of(self, token: str) -> str | None:
        """Whose token it is."""
        given, found = token.strip().encode(), None
        for name, known in self._tokens.items():
            if hmac.compare_digest(given, known):
                found = name
        return found


def _token(env: Mapping[str, str], variable: str | None) -> str:
    """A token as it can be presented: one from a file often has a line break behind it, and no header brings that."""
    return env.get(variable, "").strip() if variable else ""
