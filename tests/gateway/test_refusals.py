"""A flood of requests that are refused for what they say ends in a 429 before they are read."""

from __future__ import annotations

import time

import pytest

from gateway.errors import ApiError, Outcome
from gateway.refusals import REMEMBERED, Refusals
from policies.types import Principal, TenantId
from tests.gateway.conftest import Start


class Clock:
    """A time that tests set."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def caller(user: str | None = "ann", *, tenant: str = "alpha", key: str | None = None) -> Principal:
    return Principal(TenantId(tenant), user=user, key_id=key)


def blocked(refusals: Refusals, who: Principal | None = None) -> float | None:
    """After how many seconds it is read again; None: at once."""
    try:
        refusals.check(who or caller())
    except ApiError as error:
        return error.retry_after_s
    return None


def test_so_many_in_a_minute_and_then_one_by_one(clock: Clock) -> None:
    refusals = Refusals(3, clock)
    for _ in range(3):
        assert blocked(refusals) is None
        refusals.count(caller(), "error", 400)
    wait = blocked(refusals)
    assert wait == pytest.approx(20.0)
    clock.now += 20.0
    assert blocked(refusals) is None, "Retry-After works"
    refusals.count(caller(), "error", 400)
    assert blocked(refusals) == pytest.approx(20.0)
    clock.now += 60.0
    assert blocked(refusals) is None


def test_each_caller_has_its_own(clock: Clock) -> None:
    """A user with two keys is one caller; without a user the key is the caller."""
    refusals = Refusals(1, clock)
    refusals.count(caller(key="k1"), "error", 400)
    assert blocked(refusals, caller(key="k2"))
    for other in (caller("bob"), caller(tenant="beta"), caller(None, key="k1"), caller(None)):
        assert blocked(refusals, other) is None


@pytest.mark.parametrize(
    ("outcome", "status", "counts"),
    [
        *(("error", status, True) for status in (400, 403, 404, 413, 422)),
        ("error", 408, False),
        ("error", 409, False),
        ("throttled", 429, False),
        ("shed", 429, False),
        ("error", 503, False),
        ("error", 200, False),
        ("cancelled", 403, False),
        ("cancelled", None, False),
        ("ok", 200, False),
    ],
)
def test_what_counts_is_the_request_s_own_fault(
    clock: Clock, outcome: Outcome, status: int | None, counts: bool
) -> None:
    """gateway A7: a refusal by a limit costs nothing anywhere."""
    refusals = Refusals(1, clock)
    refusals.count(caller(), outcome, status)
    assert (blocked(refusals) is not None) is counts


def test_without_a_limit_nothing_is_counted_and_what_is_over_is_forgotten(clock: Clock) -> None:
    free = Refusals(None, clock)
    free.count(caller(), "error", 400)
    assert len(free) == 0
    refusals = Refusals(60, clock)
    for number in range(10 * REMEMBERED):
        clock.now += 0.01
        refusals.count(caller(f"user-{number}"), "error", 400)
    assert len(refusals) < 2 * REMEMBERED


async def test_a_flood_is_not_read_and_a_good_request_passes_after_the_wait(start: Start) -> None:
    """Nobody else notices; the quota is not touched."""
    changes = {
        "listen": {"port": 0, "refused_per_minute": 4},
        "tenants": [{"id": "alpha", "limits": {"requests_per_minute": 9}}, {"id": "beta"}],
    }
    async with start(changes) as site:
        began = time.monotonic()
        for _ in range(2):
            assert (await site.complete(max_tokens=-1)).status_code == 400
            assert (await site.complete(model="none")).status_code == 404
        refused = await site.complete()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "refused_too_often"
        assert 15 - (time.monotonic() - began) <= int(refused.headers["retry-after"]) <= 15
        assert (await site.complete("beta")).status_code == 200
        site.gateway.parts.pipeline.arriving._refusals._clear_at.clear()
        answer = await site.complete()
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, "8")
