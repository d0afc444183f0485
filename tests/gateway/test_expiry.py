"""A credential that ends while its stream runs, and numbers that are none."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import httpx
import pytest

from tests.gateway.harness import AUTH, MODEL, Settlements, Site, events, token, until
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = Echo(step_s=0.02)
SETTINGS: dict[str, Any] = {
    "policies": {"auth": {**AUTH, "with": {**AUTH["with"], "leeway_s": 0}}},  # type: ignore[dict-item]
    "tenants": [{"id": "alpha", "limits": {"tokens_per_minute": 100_000, "requests_per_minute": 1000}}],
}
BODY = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 8}


def ends_at(second: int) -> dict[str, str]:
    return {"authorization": f"Bearer {token('alpha', exp=second)}"}


async def test_a_stream_outlives_its_token_and_the_next_request_does_not(shared: Site) -> None:
    """security 33: the credential is checked once, when a request comes (docs/api.md)."""
    expires = math.ceil(time.time()) + 2
    body = {**BODY, "max_tokens": 180, "stream": True}  # more than three and a half seconds
    async with shared.http.stream("POST", "/v1/completions", json=body, headers=ends_at(expires)) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines()]
    assert time.time() > expires, "the stream ended too early to show anything"
    found = events("\n".join(lines))
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    again = await shared.http.post("/v1/completions", json=BODY, headers=ends_at(expires))
    assert again.status_code == 401
    assert (await shared.complete()).status_code == 200, "another token is as good as before"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("field", ['"price": %s', '"extra": {"deep": [1, {"cost": %s}]}', '"metadata": {"cost": %s}'])
async def test_a_number_that_is_none_in_a_field_nobody_reads_costs_nothing(
    shared: Site, field: str, number: str
) -> None:
    """security 69: it made the price unknown, so the reserve was zero. Here nothing is reserved."""
    settlements = Settlements(shared)
    quota = shared.gateway.parts.runtime.current.quota
    await shared.at_rest()
    remaining = (await shared.complete()).headers["x-ratelimit-remaining-requests"]
    await until(lambda: settlements.usages, "settled")
    settlements.usages.clear()
    raw = json.dumps(BODY)[:-1] + ", " + field % number + "}"
    headers = {"authorization": f"Bearer {token('alpha')}", "content-type": "application/json"}
    answer: httpx.Response = await shared.http.post("/v1/completions", content=raw, headers=headers)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not quota.dump().get("reservations")
    assert settlements.usages == []
    assert shared.slots("alpha") == 0
    settlements.close()
    assert int((await shared.complete()).headers["x-ratelimit-remaining-requests"]) >= int(remaining) - 1
