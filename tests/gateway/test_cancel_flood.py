"""A flood of which callers leave at random moments, most before anything ran (engine C7)."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.gateway.harness import MODEL, Site, pool, token
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS = 400
SEED = 7
LEAVE = 0.6
ECHO = Echo(step_s=0.005)
"""So slow that those who stay ask for twice what there is, whatever leaves beside them."""
SETTINGS: dict[str, Any] = {
    "models": [pool(max_running=4, blocks=128)],
    "policies": {"admission": {"use": "bounded", "with": {"max_queued": 40, "max_queued_per_tenant": 30}}},
    "classes": {"interactive": {"priority": 1, "max_wait_s": 0.2}},
}


async def test_whoever_leaves_when_nobody_is_told_of_an_internal_error(
    shared: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    """engine C7: cancelled 0 to 50 ms after they came, with waits that run out beside: 4xx or 503 with a reason."""
    rng = random.Random(SEED)
    port = int(shared.url.rsplit(":", 1)[1])

    async def leave(after: float, caller: str, body: dict[str, Any]) -> None:
        data = json.dumps({"model": MODEL, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token(caller)}\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.sleep(after)
        writer.close()

    async def one() -> httpx.Response | None:
        leaves = rng.random() < LEAVE
        await asyncio.sleep(rng.uniform(0, 1.5))
        body = {
            "prompt": [5] * rng.randrange(1, 200),
            "max_tokens": rng.randrange(1, 40),
            "stream": rng.random() < 0.5,
        }
        caller = rng.choice(["alpha", "beta"])
        if leaves:
            await leave(rng.uniform(0, 0.05), caller, body)
            return None
        return await shared.complete(caller, **body)

    answers = [answer for answer in await asyncio.gather(*(one() for _ in range(REQUESTS))) if answer is not None]
    await shared.at_rest()
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused, "too little pressure to show anything"
    for answer in refused:
        assert answer.status_code == 503 or 400 <= answer.status_code < 500, answer.text
        assert answer.json()["error"]["code"], answer.text
    # Of those who left only the log tells: none was taken for a fault of ours.
    told = [line for line in capsys.readouterr().out.splitlines() if " request " in line]
    assert len(told) > REQUESTS * 0.9, "the log is not where this test looks"
    assert sum("outcome=cancelled" in line for line in told) > REQUESTS * LEAVE / 10  # the others were refused before
    assert not [line for line in told if "status=500" in line or "reason=internal" in line or "[error" in line]
