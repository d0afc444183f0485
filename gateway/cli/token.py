"""``forebay token``: a signed token for one tenant, for trying things out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError

if TYPE_CHECKING:
    from gateway.cli.devkey import JwtSettings
    from gateway.settings import Settings

DEFAULT_TTL_S = 24 * 3600


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(token)


def token(
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant id, as in the configuration.")],
    config: Annotated[Path | None, typer.Option("--config", help="Configuration; the demo by default.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Put this user into the `sub` claim.")] = None,
    ttl: Annotated[int, typer.Option("--ttl", min=1, help="Seconds until it expires.")] = DEFAULT_TTL_S,
) -> None:
    """Print a token for a tenant, and nothing else.

    Audience, issuer and claim come from the configuration. The key is the one in the variable it names
    (FOREBAY_JWT_KEY), or this machine's development key.
    """
    from gateway.cli.devkey import find_key, jwt_settings
    from gateway.cli.loading import load_config

    loaded = load_config(str(config) if config else None)
    settings, path = loaded.settings, loaded.path
    jwt = jwt_settings(settings)
    if jwt is None:
        used = settings.policies.auth.use
        raise UserError(f"policies.auth: {path} authenticates with {used!r}, not with tokens signed here.", code=2)
    check_tenant(settings, tenant, path)
    if jwt.key_env is None:
        raise UserError(f"policies.auth: {path} names no key_env; its tokens come from an identity provider.", code=2)
    key = find_key(jwt.key_env)
    if key is None:
        raise UserError(
            f"No key to sign with: set {jwt.key_env}, or run `make run` (`forebay serve --dev`) once, which makes a "
            f"development key outside the repository."
        )
    print(sign(jwt, key.value, tenant, user=user, ttl=ttl))


def check_tenant(settings: Settings, tenant: str, path: Path) -> None:
    """Raise UserError for a tenant that the gateway would turn away."""
    known = [entry.id for entry in settings.tenants]
    if tenant not in known and settings.tenant_defaults is None:
        raise UserError(f"Unknown tenant {tenant!r}. {path} has: {', '.join(known) or 'none'}.", code=2)


def sign(jwt: JwtSettings, key: str, tenant: str, *, user: str | None = None, ttl: int = DEFAULT_TTL_S) -> str:
    """The token. Raises UserError when the configured algorithm takes no shared key."""
    import time

    import jwt as pyjwt

    shared = [name for name in jwt.algorithms if name.startswith("HS")]
    if not shared:
        names = ", ".join(jwt.algorithms)
        raise UserError(f"Tokens for {names} are signed by your identity provider; only HS256/384/512 are signed here.")
    now = int(time.time())
    claims: dict[str, object] = {
        "iss": jwt.issuer,
        "aud": jwt.audience,
        "sub": user or tenant,
        "iat": now,
        "exp": now + ttl,
        jwt.tenant_claim: tenant,
    }
    return pyjwt.encode(claims, key, algorithm=shared[0])
