"""Names in verified credentials that cannot be stored or shown: refused, whoever signed them, and nothing is spoilt."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.gatekeeper import check_names
from policies.spi import AuthError
from policies.types import Principal, TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import AUTH, MODEL, token

HOSTILE: list[dict[str, Any]] = [
    {"sub": "ann\ud800"},
    {"sub": "\udfffann"},
    {"sub": "ann\x00x"},
    {"sub": "ann\nbob"},
    {"sub": "ann\x9b31m"},
    {"sub": "ann\u2028bob"},
    {"sub": "\u202emoc.proc@nna"},
    {"tenant": "al\u2066pha"},
    {"sub": "x" * 513},
    {"tenant": "alp\ud800"},
    {"tenant": "alpha\x00"},
    {"tenant": "alpha\n"},
    {"groups": ["ok", "a\ud800"]},
    {"groups": ["\x7f"]},
    {"roles": ["a\tb"]},
]
FINE: list[dict[str, Any]] = [
    {"sub": "Ann O\u2019Hara \u00e5\u00a0\U0001f600 \u0646\u200c\u0645"},
    {"groups": ["g" * 512]},
    {"tenant": "\u6d4b\u8bd5"},
]


async def test_a_signed_name_that_nothing_can_hold_is_401_and_the_ledger_stays_whole(start: Start) -> None:
    """One such user once made every report fail, and the gateway could not start again on its ledger."""
    claims = {"groups_claim": "groups", "roles_claim": "roles"}
    settings = {
        "state": {"path": "state"},
        "policies": {"auth": {"use": "jwt", "with": {**AUTH["with"], **claims}}, "quota": {"use": "ledger"}},  # type: ignore[dict-item]
        "tenant_defaults": {},
    }
    async with start(settings) as site:

        async def ask(path: str, claims: dict[str, Any]) -> httpx.Response:
            headers = {"authorization": f"Bearer {token(**{'tenant': 'alpha', **claims})}"}
            if path == "/v1/usage":
                return await site.http.get(path, headers=headers)
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2}
            return await site.http.post(path, json=body, headers=headers)

        for hostile in HOSTILE:
            for path in ("/v1/completions", "/v1/usage", "/tokenize"):
                answer = await ask(path, hostile)
                assert answer.status_code == 401, (hostile, path, answer.text)
                assert answer.json()["error"]["code"] == "invalid_credential"
        for fine in FINE:
            for path in ("/v1/completions", "/v1/usage"):
                answer = await ask(path, fine)
                assert answer.status_code == 200, (fine, path, answer.text)
        report = await site.admin.get("/admin/usage?group_by=tenant,user")
        assert report.status_code == 200
        assert FINE[0]["sub"] in {row["user"] for row in report.json()["rows"]}
        for page in ("/console/requests", "/console/tenants", "/admin/overview", "/admin/queue"):
            assert (await site.admin.get(page)).status_code == 200
    async with start(settings) as site:
        assert (await site.admin.get("/admin/usage")).json()["total"]["requests"] == len(FINE)


def test_names_are_looked_at_whichever_policy_verified_them() -> None:
    for principal in (
        Principal(TenantId("")),
        Principal(TenantId("x" * 129)),
        Principal(TenantId("a"), user="\ud800"),
        Principal(TenantId("a"), roles=frozenset({"\x1b[2J"})),
    ):
        with pytest.raises(AuthError):
            check_names(principal)
    check_names(Principal(TenantId("a"), user=None, groups=frozenset({"b"})))
