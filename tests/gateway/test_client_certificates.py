"""Client certificates that a proxy passes on, over real connections: believed from the proxy's address and no other."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.harness import MODEL, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")

XFCC = "x-forwarded-client-cert"
SETTINGS: dict[str, Any] = {
    "policies": {
        "auth": {
            "use": "mtls_proxy",
            "with": {
                "trusted_proxies": ["127.0.0.1"],
                "identities": [
                    {"field": "uri", "match": "spiffe://corp/(?P<tenant>[^/]+)/(?P<user>[^/]+)"},
                    {"field": "subject", "match": "CN=batch,O=Corp", "tenant": "beta"},
                ],
            },
        }
    },
}
ANN = 'By=spiffe://corp/gateway;Hash=ab12;Subject="CN=ann,O=Corp";URI=spiffe://corp/alpha/ann'


async def ask(client: httpx.AsyncClient, *certificates: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 2}
    return await client.post("/v1/completions", json=body, headers=[(XFCC, text) for text in certificates])


async def test_the_proxys_word_is_its_callers_identity(shared: Site) -> None:
    assert (await ask(shared.http, ANN)).status_code == 200
    usage = (await shared.http.get("/v1/usage", headers={XFCC: ANN})).json()
    assert (usage["tenant"], usage["user"]) == ("alpha", "ann")
    batch = await shared.http.get("/v1/usage", headers={XFCC: 'Hash=cd;Subject="CN=batch,O=Corp"'})
    assert (batch.json()["tenant"], batch.json()["user"]) == ("beta", None)


async def test_the_same_word_from_another_address_is_nobodys(shared: Site) -> None:
    async with httpx.AsyncClient(
        base_url=shared.url, transport=httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    ) as stranger:
        refused = await ask(stranger, ANN)
        forged = await stranger.get("/v1/usage", headers={XFCC: ANN, "x-forwarded-for": "127.0.0.1"})
    assert [answer.status_code for answer in (refused, forged)] == [401, 401]
    assert refused.json()["error"]["code"] == "invalid_credential"


@pytest.mark.parametrize(
    "certificates",
    [
        (),
        ("",),
        (ANN, ANN),
        (f"{ANN},{ANN}",),
        (f"{ANN},",),
        ("URI=spiffe://corp/alpha/ann/more",),
        ("URI=spiffe://corp/gamma",),
        ('Subject="CN=batch,O=Corp, Inc"',),
        ('Subject="CN=batch\\",O=Corp"',),
        ("nonsense",),
    ],
    ids=range(10),
)
async def test_what_is_not_exactly_one_known_certificate_is_401(shared: Site, certificates: tuple[str, ...]) -> None:
    assert (await ask(shared.http, *certificates)).status_code == 401
