"""``forebay cache``: purges, receipts and public prefixes of a running gateway, from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.arch.source import ROOT
from tests.gateway.conftest import Start
from workers.testing import Echo


async def forebay_cache(*words: str) -> tuple[int, str, str]:
    """Run it in a process of its own, beside the gateway in this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.cli",
        "cache",
        *words,
        cwd=ROOT,
        env={**os.environ, "FOREBAY_ADMIN_TOKEN": "t"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_what_an_operator_does_with_caches(start: Start, tmp_path: Path) -> None:
    prompt = tmp_path / "system.txt"
    prompt.write_text("You are the assistant of this house. Answer briefly, in the language of the question.")
    async with start(echo=Echo(step_s=0.01), env={"FOREBAY_ADMIN_TOKEN": "t"}) as site:
        at = ("--url", site.admin_url)
        body = {"prompt": [50] * 64, "max_tokens": 2, "metadata": {"cache_tags": "doc/1"}}
        await site.complete(**body)
        code, out, err = await forebay_cache("purge", "alpha", "--tag", "doc/1", "--user", "ana & co", *at)
        assert code == 0, err
        receipt = json.loads(out)
        assert receipt["subject"] == {"tag": ["doc/1"], "user": ["ana & co"]}
        assert receipt["zeroed_blocks"] >= 4
        assert "nothing is left" in err
        code, out, _ = await forebay_cache("receipt", receipt["receipt"], *at)
        assert (code, json.loads(out)["signature"]) == (0, receipt["signature"])
        code, out, err = await forebay_cache("share", "echo", str(prompt), *at)
        assert code == 0, err
        made = json.loads(out)
        assert (made["name"], made["model"]) == ("system.txt", "echo")
        code, out, _ = await forebay_cache("show", *at)
        assert json.loads(out)["public_prefixes"] == [made]
        code, _, err = await forebay_cache("unshare", made["id"], *at)
        assert code == 0, err
        async with site.stream(prompt=[50] * 64, max_tokens=3000) as response:
            lines = response.aiter_lines()
            await anext(lines)
            code, out, err = await forebay_cache("purge", "alpha", *at)
        assert (code, json.loads(out)["complete"]) == (1, False)
        assert "running requests still use some blocks" in err
