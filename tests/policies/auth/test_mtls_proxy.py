"""Client certificates passed on by a proxy: believed from it alone, one at a time, compared whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.auth.mtls_proxy import parse_xfcc
from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import AuthError, PolicyConfigError, PolicyContext
from policies.types import AuthRequest

REGISTRY = Registry.from_manager(make_manager())
HASH = "468ed33be74eee6556d90c0149c1309e9ba61d6425303443c0748a02dd8de688"
XFCC = (
    f'By=spiffe://corp.example/gateway;Hash={HASH};Subject="/C=US/O=\\"Corp, Inc\\";CN=ann";'
    "URI=spiffe://corp.example/tenant/search/ann;DNS=ann.corp.example;DNS=a2.corp.example"
)
URI = {"field": "uri", "match": r"spiffe://corp\.example/tenant/(?P<tenant>[^/]+)/(?P<user>[^/]+)", "groups": ["staff"]}
BASE = {"trusted_proxies": ["10.1.0.0/16", "::1"], "identities": [URI]}


def build(**changes: Any) -> Any:
    return REGISTRY.build("auth", "mtls_proxy", {**BASE, **changes}, PolicyContext())


def asked(text: str | None = XFCC, host: str | None = "10.1.2.3", **headers: str) -> AuthRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return AuthRequest({**({"x-forwarded-client-cert": text} if text is not None else {}), **named}, host)


async def test_a_certificate_from_the_proxy_is_its_holder() -> None:
    principal = await build().authenticate(asked())
    assert (principal.tenant, principal.user, principal.groups) == ("search", "ann", {"staff"})
    assert principal.method == "mtls_proxy"
    assert principal.key_id
    assert HASH not in principal.key_id
    assert await build().authenticate(asked(host="::1"))
    assert await build().authenticate(asked(host="::ffff:10.1.2.3"))


@pytest.mark.parametrize("host", ["10.2.0.1", "127.0.0.1", "8.8.8.8", "::2", "", None, "unix:", "10.1.0.0/16"])
async def test_the_header_from_anybody_else_is_refused(host: str | None) -> None:
    """gateway B13: identity from a header counts only where the peer is trusted."""
    with pytest.raises(AuthError, match="trusted proxy"):
        await build().authenticate(asked(host=host))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        f"{XFCC},{XFCC}",
        f"{XFCC}, {XFCC}",  # how two headers of that name arrive
        f"URI=spiffe://corp.example/tenant/assist/eve,{XFCC}",
        "URI",
        "URI=;",
        'URI="spiffe://corp.example/tenant/search/ann',
        "URI=spiffe://corp.example/tenant/search/ann/more",
        "URI=x spiffe://corp.example/tenant/search/ann",
        "URI=spiffe://corpXexample/tenant/search/ann",
        "DNS=spiffe://corp.example/tenant/search/ann",
        f"URI=spiffe://corp.example/tenant/{'x' * 200}/ann",
        f"{XFCC};Cert={'x' * 20_000}",
        ";" * 5000,
        'Subject="' + "\\" * 8000,
    ],
    ids=range(16),
)
async def test_what_is_not_exactly_one_known_certificate_is_refused(text: str | None) -> None:
    with pytest.raises(AuthError):
        await build().authenticate(asked(text))


async def test_a_proxy_that_passes_unverified_certificates_says_which_are_verified() -> None:
    auth = build(
        format="subject",
        header="x-ssl-client-subject",
        verified_header="x-ssl-client-verify",
        identities=[{"field": "subject", "match": "CN=ann,O=Corp", "tenant": "search", "user": "ann"}],
    )
    good = {"x_ssl_client_subject": "CN=ann,O=Corp", "x_ssl_client_verify": "SUCCESS"}
    assert (await auth.authenticate(asked(None, **good))).tenant == "search"
    for verdict in ("FAILED:expired", "NONE", "", "SUCCESS, SUCCESS"):
        with pytest.raises(AuthError):
            await auth.authenticate(asked(None, **{**good, "x_ssl_client_verify": verdict}))
    with pytest.raises(AuthError):
        await auth.authenticate(asked(None, x_ssl_client_subject="CN=ann,O=Corp"))


async def test_the_first_identity_that_matches_wins() -> None:
    by_hash = {"field": "hash", "match": HASH, "tenant": "ci", "roles": ["deploy"]}
    principal = await build(identities=[by_hash, URI]).authenticate(asked())
    assert (principal.tenant, principal.roles) == ("ci", {"deploy"})


def test_fields_are_read_as_the_proxy_writes_them() -> None:
    fields = parse_xfcc(XFCC)
    assert fields["subject"] == ['/C=US/O="Corp, Inc";CN=ann']
    assert fields["dns"] == ["ann.corp.example", "a2.corp.example"]
    assert fields["hash"] == [HASH]


@pytest.mark.parametrize(
    ("change", "path", "message"),
    [
        ({"trusted_proxies": []}, "with.trusted_proxies", ""),
        ({"trusted_proxies": ["0.0.0.0/0"]}, "with.trusted_proxies", "believe everybody"),
        ({"trusted_proxies": ["::/0"]}, "with.trusted_proxies", "believe everybody"),
        ({"trusted_proxies": ["proxy.example"]}, "with.trusted_proxies", "no address or network"),
        ({"trusted_proxies": ["10.1.2.3/16"]}, "with.trusted_proxies", "host bits"),
        ({"header": "X-Cert"}, "with.header", "pattern"),
        ({"identities": []}, "with.identities", ""),
        ({"identities": [{"field": "uri", "match": "("}]}, "with.identities.0.match", "no regular expression"),
        ({"identities": [{"field": "uri", "match": "x"}]}, "with.identities.0", "names no tenant"),
        ({"identities": [{**URI, "field": "cn"}]}, "with.identities.0.field", "'uri', 'dns'"),
    ],
)
def test_unsafe_configurations_do_not_start(change: dict[str, Any], path: str, message: str) -> None:
    with pytest.raises(PolicyConfigError) as caught:
        build(**change)
    found = dict(caught.value.mistakes)
    assert message in found[path], found


async def test_a_header_that_came_twice_is_refused_in_either_format() -> None:
    """A proxy that adds to what the client sent: joined, the two could pass for one subject with a comma in it."""
    header = "x-ssl-client-subject"
    identities = [{"field": "subject", "match": "CN=eve, CN=ann|CN=ann", "tenant": "search"}]
    auth = build(format="subject", header=header, identities=identities)
    joined = {header: "CN=eve, CN=ann"}
    assert (await auth.authenticate(AuthRequest(joined, "10.1.2.3"))).tenant == "search"
    with pytest.raises(AuthError, match="more than once"):
        await auth.authenticate(AuthRequest(joined, "10.1.2.3", frozenset({header})))
    again = replace(asked(), repeated=frozenset({"x-forwarded-client-cert"}))
    with pytest.raises(AuthError, match="more than once"):
        await build().authenticate(again)
