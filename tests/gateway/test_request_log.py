"""The request log: one whole line per request, lengths and times only, and no request ever fails for it."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from gateway.compose import BuildError, build
from gateway.log import RequestSummary
from gateway.request_log import RequestLog, prefixes
from gateway.settings import Settings
from policies.types import Job, JobId, PrefixKey, TenantId, Usage
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, KEY, merged


def summary(**fields: Any) -> RequestSummary:
    base: dict[str, Any] = {"request_id": "r", "route": "/v1/completions", "outcome": "ok", "duration_s": 2.0}
    return RequestSummary(**{**base, "tenant": "alpha", "usage": Usage(10, 0, 5), **fields})


def job(keys: int = 0) -> Job:
    made = tuple(PrefixKey(bytes([i]) * 32) for i in range(keys))
    return Job(JobId("j"), TenantId("alpha"), "m", 10, 20, 0.0, user="somebody", prefix_keys=made)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_and_how_long_and_nothing_of_whom(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path)
    log.write(summary(queue_wait_s=0.5, first_token_s=0.75, model="m"), job(keys=5), 16)
    log.close()
    [line] = lines(path)
    assert line["prompt"] == 10
    assert line["output"] == 5
    assert line["max_tokens"] == 20
    assert line["first_token_s"] == 0.75
    assert line["prefixes"] == ["00" * 6, "01" * 6, "03" * 6]
    assert "somebody" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_depths_double_so_that_long_prompts_stay_short_lines() -> None:
    assert len(prefixes(job(keys=100))) == 7
    assert prefixes(job()) == []


def test_callers_without_a_tenant_leave_no_line(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "r.jsonl")
    log.write(summary(tenant=None), None, None)
    log.write(summary(outcome="shed", reason="queue_full"), job(), 16)
    log.close()
    assert [line["outcome"] for line in lines(tmp_path / "r.jsonl")] == ["shed"]


def test_a_disk_that_fails_costs_lines_not_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again with the next line."""
    folder = tmp_path / "disk"
    folder.mkdir()
    log = RequestLog(folder / "r.jsonl")
    log.close()
    (folder / "r.jsonl").unlink()
    folder.rmdir()
    log.write(summary(), job(), 16)
    log.write(summary(), job(), 16)
    folder.mkdir()
    log.write(summary(), job(), 16)
    log.close()
    assert len(lines(folder / "r.jsonl")) == 1


def test_a_file_that_cannot_be_opened_stops_the_start(tmp_path: Path) -> None:
    changes = {"telemetry": {"request_log": "no/such/folder/r.jsonl"}}
    settings = Settings.model_validate(
        merged(BASE, changes) | {"models": [{**BASE["models"][0], "pools": [{"name": "p"}]}]}
    )
    with pytest.raises(BuildError, match=r"telemetry\.request_log: .*No such file"):
        build(settings, base_dir=tmp_path, env={"FOREBAY_JWT_KEY": KEY})


async def test_a_gateway_writes_a_line_per_request(start: Start, tmp_path: Path) -> None:
    """Prompts of 40 tokens that begin alike share their prefixes; a refused one is in the log too."""
    async with start({"telemetry": {"request_log": "requests.jsonl"}}) as site:
        first = list(range(100, 132))
        for tail in ([1] * 8, [2] * 8):
            assert (await site.complete(prompt=first + tail, max_tokens=4)).status_code == 200
        assert (await site.complete(prompt=first, max_tokens=100_000)).status_code == 400
        await site.at_rest()
    found = lines(tmp_path / "requests.jsonl")
    assert [line["outcome"] for line in found] == ["ok", "ok", "error"]
    assert [(line["prompt"], line["output"]) for line in found[:2]] == [(40, 4), (40, 4)]
    assert found[0]["prefixes"] == found[1]["prefixes"]
    assert len(found[0]["prefixes"]) == 2
    assert found[1]["arrival"] >= found[0]["arrival"]
