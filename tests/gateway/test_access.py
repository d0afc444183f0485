"""What tenants, groups and users may ask for: narrowed, never widened, and refused by name."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.access import Grant, check_features, class_refused, least, model_refused
from gateway.errors import ApiError
from gateway.settings_access import Narrowed
from policies.types import Principal, TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import AUTH, Site, pool, token

TENANTS = [
    {
        "id": "alpha",
        "models": ["echo", "other*"],
        "classes": ["interactive", "batch"],
        "features": ["logprobs", "n", "tools"],
        "limits": {"max_output_tokens": 64, "max_context_tokens": 512},
        "groups": {
            "interns": {"models": ["echo", "secret"], "features": ["n"], "limits": {"max_output_tokens": 8}},
            "night": {"classes": ["batch"]},
        },
        "users": {
            "eve": {"models": [], "limits": {"max_context_tokens": 16}},
            "max": {"limits": {"max_output_tokens": 999}},
        },
    },
    {"id": "beta", "models": ["other"], "features": []},
]
MODELS = [pool(), {**pool(), "name": "other"}, {**pool(), "name": "secret"}]
GROUPED = {**AUTH, "with": {**AUTH["with"], "groups_claim": "groups"}}
SETTINGS = {
    "policies": {"auth": GROUPED},
    "tenants": TENANTS,
    "models": MODELS,
}
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ask(
    site: Site, tenant: str = "alpha", *, claims: dict[str, Any] | None = None, **body: Any
) -> httpx.Response:
    body = {"model": "echo", "prompt": [5, 6, 7, 8], "max_tokens": 4, **body}
    headers = {"authorization": f"Bearer {token(tenant, **(claims or {}))}", **body.pop("headers", {})}
    return await site.http.post("/v1/completions", json=body, headers=headers)


def error(answer: httpx.Response) -> tuple[int, str, str]:
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["message"]


INTERN, NIGHT, EVE = {"groups": ["interns"]}, {"groups": ["night"]}, {"sub": "eve"}


async def test_features_are_the_tenants_and_a_group_narrows_them(shared: Site) -> None:
    assert (await ask(shared, n=2)).status_code == 200
    assert (await ask(shared, logprobs=1)).status_code == 200
    assert (await ask(shared, claims=INTERN, n=2)).status_code == 200
    refused = error(await ask(shared, claims=INTERN, logprobs=1))
    assert refused == (403, "feature_not_allowed", "The group 'interns' may not use logprobs.")
    assert error(await ask(shared, "beta", model="other", n=2))[2] == "Your tenant may not use n."
    assert (await ask(shared, "beta", model="other")).status_code == 200
    chat = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}
    answer = await shared.http.post(
        "/v1/chat/completions", json=chat, headers={"authorization": f"Bearer {token('alpha')}"}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "response_format")


async def test_models_of_the_tenant_hide_those_of_a_group_are_named(shared: Site) -> None:
    assert error(await ask(shared, model="secret"))[:2] == (404, "model_not_found")
    assert error(await ask(shared, claims=INTERN, model="secret"))[:2] == (404, "model_not_found"), "no group widens"
    refused = error(await ask(shared, claims=INTERN, model="other"))
    assert refused == (403, "model_not_allowed", "The group 'interns' may not use the model 'other'.")
    assert error(await ask(shared, claims=EVE))[2] == "The user 'eve' may not use the model 'echo'."

    async def listed(tenant: str, **claims: Any) -> list[str]:
        headers = {"authorization": f"Bearer {token(tenant, **claims)}"}
        return [model["id"] for model in (await shared.http.get("/v1/models", headers=headers)).json()["data"]]

    assert await listed("alpha") == ["echo", "other"]
    assert await listed("alpha", **INTERN) == ["echo"]
    assert await listed("alpha", **EVE) == []
    assert await listed("beta") == ["other"]


async def test_output_and_context_of_a_group_and_a_user(shared: Site) -> None:
    assert (await ask(shared, max_tokens=64)).status_code == 200
    assert error(await ask(shared, max_tokens=65))[1] == "max_output_tokens_exceeded"
    assert (await ask(shared, claims=INTERN, max_tokens=8)).status_code == 200
    assert error(await ask(shared, claims=INTERN, max_tokens=9))[1] == "max_output_tokens_exceeded"
    assert error(await ask(shared, claims={"sub": "max"}, max_tokens=65))[1] == "max_output_tokens_exceeded"
    omitted = await ask(shared, claims=INTERN, max_tokens=None)
    assert omitted.json()["usage"]["completion_tokens"] == 8
    both = Principal(TenantId("alpha"), user="eve", groups=frozenset({"interns"}))
    narrowed = shared.gateway.parts.tenants.of(both)
    assert (narrowed.limits.max_output_tokens, narrowed.limits.max_context_tokens) == (8, 16)


async def test_classes(shared: Site) -> None:
    """gateway B13: lower is allowed where it is granted; higher is never looked at."""

    async def ran_in(**options: Any) -> str:
        before = set(map(id, shared.gateway.parts.recent.slowest(1000, 600)))
        answer = await ask(shared, **options)
        assert answer.status_code == 200, answer.text
        (new,) = [one for one in shared.gateway.parts.recent.slowest(1000, 600) if id(one) not in before]
        return str(new.summary.service_class)

    assert await ran_in() == "interactive"
    assert await ran_in(headers={"x-forebay-class": "batch"}) == "batch"
    assert await ran_in(claims=NIGHT) == "batch", "the best class that the group may have"
    refused = error(await ask(shared, claims=NIGHT, headers={"x-forebay-class": "interactive"}))
    assert refused == (403, "class_not_allowed", "The group 'night' may not use the class 'interactive'.")
    assert await ran_in(headers={"x-forebay-class": "nonsense"}) == "interactive"


async def test_a_class_that_nobody_may_have_is_refused_by_name(start: Start) -> None:
    tenants = [{"id": "alpha", "classes": ["interactive"], "groups": {"night": {"classes": ["batch"]}}}]
    async with start({"policies": {"auth": GROUPED}, "tenants": tenants}) as site:
        refused = error(await site.complete(headers={"x-forebay-class": "batch"}))
        assert refused[:2] == (403, "class_not_allowed")
        assert "Your tenant may not use the class 'batch'" in refused[2]
        headers = {"authorization": f"Bearer {token('alpha', **NIGHT)}"}
        assert error(await site.complete(headers=headers))[:2] == (403, "class_not_allowed")


async def test_grants() -> None:
    grant = Grant.of("The group 'g'", Narrowed(models=("a*",), classes=("batch",), features=("n",)))
    assert grant.may_use("abc")
    assert not grant.may_use("bc")
    everything = Grant.of("Your tenant", Narrowed())
    assert everything.may_use("x")
    assert everything.may_have("y")
    check_features({"n"}, [everything, grant])
    with pytest.raises(ApiError, match="The group 'g' may not use tools"):
        check_features({"n", "tools"}, [everything, grant])
    assert model_refused("abc", [everything, grant]) is None
    assert class_refused("batch", [everything, grant]) is None
    refusal = class_refused("x", [everything, grant])
    assert refusal is not None
    assert refusal.status == 403
    assert (least(5, [None, 3]), least(None, [None]), least(2, [7])) == (3, None, 2)
