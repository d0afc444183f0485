"""``mtls_proxy``: client certificates that a proxy in front has verified, passed on in a header.

Rules
- The header counts only on connections from ``trusted_proxies``; from anywhere else it is a refusal, whatever it says.
  The proxy must delete what clients send under that name (Envoy: ``SANITIZE_SET``).
- Exactly one certificate: a header with several (or sent twice) is refused, since nobody can tell who put which there.
- What a certificate says is compared whole: a pattern has to match all of a value. The first match wins.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from pydantic import Field, field_validator, model_validator

from policies.spi import AuthError, PolicyConfig, PolicyContext, PolicySpec
from policies.types import AuthRequest, Principal, TenantId

MAX_HEADER_CHARS = 16 * 1024
_MAX_TENANT_CHARS = 128
_PAIR = re.compile(r'\s*([A-Za-z]+)=(?:"((?:[^"\\]|\\.)*)"|([^";,]*))\s*([;,]|$)')

Certificate = Mapping[str, Sequence[str]]
"""Its fields by name in lower case: ``uri``, ``dns``, ``subject``, ``hash``; a name may have several values."""


class Identity(PolicyConfig):
    """Who a certificate stands for."""

    field: Literal["uri", "dns", "subject", "hash"]
    match: str = Field(min_length=1)
    """A regular expression for the whole value; its groups ``tenant`` and ``user`` count where the entry has none."""
    tenant: str | None = Field(None, min_length=1, max_length=_MAX_TENANT_CHARS)
    user: str | None = None
    groups: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()

    @field_validator("match")
    @classmethod
    def _compiles(cls, match: str) -> str:
        try:
            re.compile(match)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return match

    @model_validator(mode="after")
    def _names_a_tenant(self) -> Identity:
        if self.tenant is None and "tenant" not in self.pattern.groupindex:
            raise ValueError("names no tenant; give tenant, or a group in match: (?P<tenant>[^/]+)")
        return self

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """``match``, compiled."""
        return re.compile(self.match)


class MtlsProxyConfig(PolicyConfig):
    """From whom the header is believed, and who is who."""

    trusted_proxies: tuple[str, ...] = Field(min_length=1)
    """Addresses or networks (CIDR)."""
    header: str = Field("x-forwarded-client-cert", pattern=r"^[a-z0-9-]+$")
    format: Literal["xfcc", "subject"] = "xfcc"
    """``xfcc``: ``Hash=…;Subject="…";URI=…;DNS=…``; ``subject``: the header is the subject and nothing else."""
    verified_header: str | None = Field(None, pattern=r"^[a-z0-9-]+$")
    """A header that must say ``SUCCESS`` (nginx: ``$ssl_client_verify``), for proxies that pass unverified ones too."""
    identities: tuple[Identity, ...] = Field(min_length=1)

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                network = ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"{proxy!r} is no address or network: {error}") from None
            if network.prefixlen == 0:
                raise ValueError(f"{proxy!r} would believe everybody; name the proxies' own addresses")
        return proxies


class MtlsProxyAuth:
    """See the module's rules."""

    def __init__(self, config: MtlsProxyConfig) -> None:
        self._config = config
        self._networks = [ipaddress.ip_network(proxy) for proxy in config.trusted_proxies]

    async def authenticate(self, request: AuthRequest) -> Principal:
        """Who the passed certificate stands for. Raises AuthError."""
        text = request.headers.get(self._config.header)
        if not text:
            raise AuthError("no client certificate was passed on")
        if self._config.header in request.repeated:
            raise AuthError("the header came more than once: the proxy has to set it, not to add to it")
        if not self._trusts(request.client_host):
            raise AuthError("a client certificate from a peer that is no trusted proxy")
        verified = self._config.verified_header
        if verified is not None and request.headers.get(verified) != "SUCCESS":
            raise AuthError("the proxy has not verified the certificate")
        if len(text) > MAX_HEADER_CHARS:
            raise AuthError("the header is too long")
        certificate = parse_xfcc(text) if self._config.format == "xfcc" else {"subject": [text.strip()]}
        return self._principal(certificate)

    def _trusts(self, host: str | None) -> bool:
        try:
            address = ipaddress.ip_address(host or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)

    def _principal(self, certificate: Certificate) -> Principal:
        for identity in self._config.identities:
            for value in certificate.get(identity.field, ()):
                found = identity.pattern.fullmatch(value)
                if found is None:
                    continue
                groups = found.groupdict()
                tenant = identity.tenant or groups.get("tenant") or ""
                if not 0 < len(tenant) <= _MAX_TENANT_CHARS:
                    raise AuthError("the certificate names no tenant")
                known_by = next(iter(certificate.get("hash", ())), value)
                return Principal(
                    TenantId(tenant),
                    user=identity.user or groups.get("user") or None,
                    groups=identity.groups,
                    roles=identity.roles,
                    method="mtls_proxy",
                    key_id=hashlib.sha256(known_by.encode()).hexdigest()[:12],
                )
        raise AuthError("the certificate is nobody's here")


def parse_xfcc(text: str) -> dict[str, list[str]]:
    """The one certificate of an ``x-forwarded-client-cert`` header. Raises AuthError for several, or none."""
    fields: dict[str, list[str]] = {}
    for name, value in _pairs(text):
        fields.setdefault(name.lower(), []).append(value)
    return fields


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        pair = _PAIR.match(text, at)
        if pair is None:
            raise AuthError("the header is not in the form of x-forwarded-client-cert")
        name, quoted, plain, end = pair.groups()
        yield name, re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain.strip()
        at = pair.end()
        if end == ",":
            raise AuthError("several client certificates: the proxy has to set the header, not append to it")


def _make(config: MtlsProxyConfig, ctx: PolicyContext) -> MtlsProxyAuth:
    return MtlsProxyAuth(config)


SPEC = PolicySpec(
    "auth", "mtls_proxy", MtlsProxyConfig, _make, "Client certificates that a trusted proxy has verified and passes on."
)
