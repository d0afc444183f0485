"""Two workers of one core each: both doing everything, or one computing prompts and the other answering.

Rules
- The real gateway in a process of its own with real workers; requests come over HTTP, tokens count when they arrive.
- Streams of short requests run all the time; a long prompt comes every few seconds, whether or not the last one is
  done. What is told is the time between tokens of the short requests.
- Every turn starts everything anew, so nothing is cached and no warm-up round is needed beside a few requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from gateway.bench import load, metrics
from gateway.bench.http_client import HttpClient
from gateway.bench.load import Timeline
from gateway.bench.report import BenchError
from gateway.bench.serve import Attack, Server
from gateway.bench.stage import TENANTS, is_ready, process, tenant_tokens, wait_for
from gateway.bench.techniques.lab import Found, Lab
from gateway.bench.traffic import Shot, Tenant

MODEL = "measured"
STREAMS = 6
SHORT = 64
"""Prompt and answer tokens of a short request."""
EVERY_S = 3.0
"""Between two long prompts."""
_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Side:
    lines: list[Timeline] = field(default_factory=list)
    long: list[Timeline] = field(default_factory=list)
    transfers: int = 0


def apart(lab: Lab) -> Found:
    """99th percentile of the time between tokens. Raises BenchError."""
    length = lab.shape.long_tokens // 2
    shared, roles = _Side(), _Side()

    def turn(side: _Side, pools: Sequence[dict[str, Any]]) -> float:
        with _served(lab, pools) as (url, token, admin):
            lines, long, transfers = asyncio.run(_attacked(lab, url, token, admin, length))
        side.lines += lines
        side.long += long
        side.transfers += transfers
        figure = metrics.summarise(lines)["itl_p99_ms"]
        if figure is None:
            raise BenchError("no short request was answered: give it more --seconds")
        return float(figure)

    together = [_pool(lab, "both", 2)]
    divided = [_pool(lab, "prefill", 1), _pool(lab, "decode", 1)]
    pairs = []
    with lab.display.task("role prefill and decode") as tick:
        for number in range(lab.shape.rounds):
            pairs.append((turn(shared, together), turn(roles, divided)))
            tick(number + 1, lab.shape.rounds)
    proof = {
        "prompts handed over": roles.transfers,
        "itl p50 ms": _both(shared.lines, roles.lines, "itl_p50_ms"),
        "tokens of short requests": f"{_tokens(shared.lines)} off, {_tokens(roles.lines)} on",
        "ttft p50 ms, short": _both(shared.lines, roles.lines, "ttft_p50_ms"),
        "ttft p50 ms, long": _both(shared.long, roles.long, "ttft_p50_ms"),
        "failed": f"{_failed(shared)} off, {_failed(roles)} on",
    }
    where = f"{STREAMS} streams, a prompt of {length} tokens every {EVERY_S:g} s"
    return Found(where, "ms between tokens, p99", pairs, proof, roles.transfers > 0, ("role: prefill and decode",))


def _pool(lab: Lab, role: str, count: int) -> dict[str, Any]:
    engine = lab.target.engine.model_dump(mode="json", exclude_defaults=True)
    for name in ("tiers", "adapters", "adapter_memory", "cores"):
        engine.pop(name, None)
    engine |= {"threads": 1, "role": role, "kv_cache": engine.get("kv_cache", "256MiB")}
    return {"name": role, "launch": {"use": "local", "count": count}, "engine": engine}


@contextlib.contextmanager
def _served(lab: Lab, pools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(URL, a caller's token, admin URL) of a gateway whose workers are all ready. Raises BenchError."""
    key = secrets.token_urlsafe(48)
    jwt = {"algorithms": ["HS256"], "audience": "forebay", "issuer": "bench", "key_env": "FOREBAY_JWT_KEY"}
    limit = 10**9
    tenant = next(iter(TENANTS))
    config = {
        "listen": {"port": 0},
        "admin": {"port": 0},
        "policies": {"auth": {"use": "jwt", "with": jwt}},
        "tenants": [
            {
                "id": tenant,
                "limits": {"requests_per_minute": limit, "tokens_per_minute": limit, "concurrent": 1024},
            }
        ],
        "models": [{"name": MODEL, "source": str(lab.files.dir), "pools": list(pools)}],
    }
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        path, ready = folder / "gateway.yaml", folder / "ready.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "gateway.cli", "serve", str(path), "--ready-file", str(ready)]
        with process(folder, "gateway", command, {"FOREBAY_JWT_KEY": key}) as gateway:
            info = json.loads(wait_for(lambda: ready.read_text() if ready.exists() else "", gateway, folder, "gateway"))
            wait_for(lambda: "ready" if is_ready(info["url"]) else "", gateway, folder, "gateway")
            admin = info["admin_url"]
            wait_for(lambda: "all" if len(_ready(admin)) == 2 else "", gateway, folder, "gateway")
            yield info["url"], tenant_tokens(key)[tenant], admin


async def _attacked(
    lab: Lab, url: str, token: str, admin: str, length: int
) -> tuple[list[Timeline], list[Timeline], int]:
    seconds, vocab = lab.shape.seconds, lab.plain.vocab
    callers = [Tenant("bench", token)]

    def shots(kind: str, count: int, given: int, wanted: int, every: float | None) -> list[Shot]:
        times = (None if every is None else every * (index + 0.5) for index in range(count))
        return [
            Shot(0, load.prompt(f"{kind}/{index}", given, vocab), given, wanted, at) for index, at in enumerate(times)
        ]

    client = HttpClient(url)
    try:
        attack = Attack(Server(url, MODEL, timeout_s=_TIMEOUT_S), callers, client)
        nothing = _no_progress
        await attack.closed_loop(shots("warm", 2 * STREAMS, SHORT, 8, None), STREAMS, nothing)
        many = max(STREAMS, int(seconds * 200))
        short = attack.closed_loop(shots("short", many, SHORT, SHORT, None), STREAMS, nothing, seconds=seconds)
        longs = attack.open_loop(shots("long", max(1, int(seconds / EVERY_S)), length, 8, EVERY_S), nothing)
        lines, long = await asyncio.gather(short, longs)
    finally:
        client.close()
    return lines, long, sum(map(_transfers, await asyncio.to_thread(_ready, admin)))


def _no_progress(done: int, total: int) -> None:
    """Turns are told, not requests."""


def _ready(admin: str) -> list[dict[str, Any]]:
    with urlopen(f"{admin}/admin/workers", timeout=10) as answer:  # noqa: S310 - our own gateway
        workers = json.loads(answer.read())["workers"]
    return [worker for worker in workers if worker["state"] == "ready"]


def _transfers(worker: dict[str, Any]) -> int:
    with urlopen(f"http://127.0.0.1:{worker['metrics_port']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.search(r'^forebay_kv_transfer_seconds_count\{result="ok"\} (\d+)', text, re.MULTILINE)
    return int(found[1]) if found else 0


def _both(off: list[Timeline], on: list[Timeline], name: str) -> str:
    first, second = (metrics.summarise(lines)[name] for lines in (off, on))
    return f"{first} off, {second} on"


def _tokens(lines: list[Timeline]) -> int:
    return sum(line.outputs for line in lines)


def _failed(side: _Side) -> int:
    return sum(line.error is not None for line in (*side.lines, *side.long))
