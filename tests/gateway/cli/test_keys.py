"""`forebay keys` and `forebay audit` against a running gateway and its files."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from gateway.cli.keys import seconds
from gateway.cli.output import UserError
from tests.arch.source import ROOT
from tests.gateway.conftest import Start


async def forebay(*words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli", *words, cwd=ROOT, stdout=-1, stderr=-1, stdin=asyncio.subprocess.DEVNULL
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_keys_life_from_the_command_line(start: Start, tmp_path: Path) -> None:
    changes = {"state": {"path": "state"}, "policies": {"auth": {"use": "api_key"}}}
    async with start(changes, ready=False) as site:

        async def status(secret: str) -> int:
            answer = await site.http.get("/v1/models", headers={"authorization": f"Bearer {secret.strip()}"})
            return answer.status_code

        at = ("--url", site.admin_url)
        code, secret, said = await forebay(
            "keys", "create", "--tenant", "alpha", "--user", "ann", "--expires", "9d", *at
        )
        assert (code, secret.count("\n"), await status(secret)) == (0, 1, 200), said
        key = said.split()[1]
        code, listed, _ = await forebay("keys", "list", *at)
        assert listed.split()[:5] == [key, secret[:11], "alpha", "ann", "active"]
        assert secret.strip() not in listed
        code, other, said = await forebay("keys", "rotate", key, "--overlap", "0s", *at)
        assert (code, await status(secret), await status(other)) == (0, 401, 200), said
        code, out, _ = await forebay("keys", "revoke", key, *at)
        assert (code, out, await status(other)) == (0, "", 401)
        code, out, said = await forebay("keys", "create", "--tenant", "nobody", *at)
        assert (code, out) == (1, "")
        assert "no such tenant" in said
    log = tmp_path / "state" / "audit.jsonl"
    code, head, said = await forebay("audit", "verify", str(log))
    assert (code, head.split(":")[0]) == (0, "3"), said
    assert "3 entries, complete and unchanged" in said
    assert (await forebay("audit", "verify", str(log), "--expect", head.strip()))[0] == 0
    code, shown, _ = await forebay("audit", "show", str(log), "--limit", "1")
    assert '"key.revoke"' in shown
    log.write_bytes(log.read_bytes().replace(b"alpha", b"beta!", 1))
    code, out, said = await forebay("audit", "verify", str(log))
    assert (code, out) == (1, "line 1: was changed, or written without the key\n")
    assert "not as it was written" in said


@pytest.mark.parametrize(("text", "expected"), [("90d", 7_776_000), ("12h", 43_200), ("30m", 1800), ("0s", 0)])
def test_times(text: str, expected: float) -> None:
    assert seconds(text, "--expires") == expected


@pytest.mark.parametrize("text", ["", "d", "5", "-5d", "5y", "1.5h", "9999999s", "٣d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--expires: .* is no time"):
        seconds(text, "--expires")
