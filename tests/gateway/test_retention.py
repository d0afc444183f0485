"""``privacy.cache_retention_s``: nothing cached lives longer, however often it is hit; then it is zeroed."""

from __future__ import annotations

import asyncio

from tests.gateway.conftest import Start
from tests.gateway.harness import until

SHORT = {
    "tenants": [
        {"id": "alpha", "privacy": {"cache_retention_s": 1.0}},
        {"id": "beta"},
    ]
}


async def test_a_hot_prefix_ends_with_its_window_and_is_zeroed(start: Start) -> None:
    """Asked for all the time, it is computed anew in every window; the other tenant's is hit for ever."""
    async with start(SHORT) as site:
        assert (await site.complete("beta", prompt=[50] * 64, max_tokens=2)).status_code == 200
        hits, began = [], asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - began < 3.5:
            answer = await site.complete("alpha", prompt=[60] * 64, max_tokens=2)
            hits.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            await asyncio.sleep(0.02)
        assert 3 <= hits.count(0) <= 6
        assert max(hits) == 48
        again = await site.complete("beta", prompt=[50] * 64, max_tokens=2)
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        [handle] = site.dispatcher.workers
        # What is left in the end is beta's: every window of alpha was zeroed and is free.
        await until(lambda: handle.stats.cached_blocks == 4, "swept")
        assert site.gateway.parts.tenants.with_scopes()


async def test_what_a_worker_was_not_asked_about_is_swept_when_it_is_back(start: Start) -> None:
    async with start(SHORT) as site:
        tenants = site.gateway.parts.tenants
        alpha = tenants.get("alpha")  # type: ignore[arg-type]
        tenants.used(alpha, b"old scope")
        await until(lambda: not tenants._scopes.of(alpha.id), "swept and forgotten")
