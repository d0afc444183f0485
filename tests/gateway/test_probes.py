"""What a stranger's probe of somebody's cached prompt costs the engine: nothing that tells (engine A3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from policies.types import Usage
from tests.gateway.harness import Settlements, Site, pool, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS: dict[str, Any] = {"models": [pool(max_step_tokens=64)]}


async def ask(site: Site, tenant: str, prompt: Sequence[int]) -> tuple[Usage, int, int]:
    """What was charged, how many tokens hit, and in how many steps it ran."""
    [worker] = site.dispatcher.workers
    hits, step = worker.stats.hit_tokens, worker.step
    settlements = Settlements(site)
    answer = await site.complete(tenant, prompt=list(prompt), max_tokens=4)
    assert answer.status_code == 200, answer.text
    await until(lambda: settlements.usages, "settled")
    settlements.close()
    await site.at_rest()
    [usage] = settlements.usages
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == usage.cached
    return usage, worker.stats.hit_tokens - hits, worker.step - step


@pytest.mark.parametrize("length", [17, 64, 400])
async def test_a_strangers_probe_computes_as_much_as_a_fresh_prompt(shared: Site, length: int) -> None:
    """engine A3, without a clock: no token of it is skipped, so no time is saved that could tell."""
    warm = [3 + (length + number) % 97 for number in range(length)]
    fresh = [token + 150 for token in warm]
    await ask(shared, "alpha", warm)
    own = await ask(shared, "alpha", warm)
    assert own[0].cached == own[1] > 0, "the prompt is cached for its owner"
    assert own[0].prompt == length - own[0].cached
    probe, unknown = await ask(shared, "beta", warm), await ask(shared, "beta", fresh)
    assert probe == unknown == (Usage(prompt=length, cached=0, output=4), 0, probe[2])
