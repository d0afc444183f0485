"""``forebay adapter``: what an operator does with adapters from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.arch.source import ROOT
from tests.gateway.harness import pool, running
from tests.gateway.test_adapters import write


async def forebay_adapter(*words: str) -> tuple[int, str, str]:
    """Run it in a process of its own, beside the gateway in this one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.cli", "adapter", *words),
        cwd=ROOT,
        env={**os.environ, "FOREBAY_ADMIN_TOKEN": "t"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_loading_listing_and_dropping(tmp_path: Path) -> None:
    write(tmp_path, "one")
    changes = {"models": [pool(adapter_memory=1000)]}
    async with running(tmp_path, changes, env={"FOREBAY_ADMIN_TOKEN": "t"}) as site:
        at = ("--url", site.admin_url)
        code, out, err = await forebay_adapter("load", "echo", "sql", "one", *at)
        assert code == 0, err
        made = json.loads(out)
        code, out, _ = await forebay_adapter("list", *at)
        assert (code, json.loads(out)) == (0, {"adapters": [made]})
        code, _, err = await forebay_adapter("load", "echo", "law", "nowhere", *at)
        assert code == 1
        assert "is no directory" in err
        code, out, _ = await forebay_adapter("drop", "echo:sql", *at)
        assert (code, json.loads(out)["freed"]) == (0, True)
        code, _, err = await forebay_adapter("drop", "sql", *at)
        assert code == 1
        assert "There is no adapter 'sql'" in err
