"""The page of workers: what an engine's techniques do there, and that a name is only ever text."""

from __future__ import annotations

from typing import Any

from gateway.adapters import Adapter
from gateway.console_workers import WorkerRow, worker_row
from gateway.http.console.render import Renderer
from gateway.worker_handle import WorkerHandle
from tests.gateway.console.browser import text
from tests.gateway.test_worker_handle import Line
from workers.protocol import AdapterInfo, Hello, StepOutputs, TierStats, WorkerStats

HOSTILE = "<img src=x onerror=alert(1)>"
DIGEST = "sha256:" + "ab" * 32


def row(stats: WorkerStats, named: list[Adapter] | None = None, **hello: Any) -> WorkerRow:
    """What a worker that reports ``stats`` looks like."""
    handle = WorkerHandle("m/local-0", model="m", pool="local", labels={}, incarnation=1, clock=lambda: 1.0)
    greeting = Hello(
        protocol=5, worker="w", model="m", model_revision="r", tokenizer_sha256="t", block_size=16, blocks=64,
        max_running=4, max_context=512, **hello,
    )  # fmt: skip
    handle.opened(Line(), greeting)
    handle.received(StepOutputs(1, [], stats))
    return worker_row(handle, {"set_aside": False, "stale": False}, {}, {}, named or [])


def page(*rows: WorkerRow) -> str:
    """The words of the page with these workers."""
    status = {"ready": True, "missing": (), "stalled": (), "workers_ready": 1, "workers": 1, "generation": 1}
    html = Renderer().html("_workers.html", {"rows": rows, "status": status, "csrf": "c"})
    assert HOSTILE not in html
    return text(html)


def test_a_plain_worker_shows_none_of_it() -> None:
    shown = page(row(WorkerStats(free_blocks=64)))
    for words in ("Guesses right", "Below the device", "Prompts from elsewhere", "Adapters", "decode", "prefill"):
        assert words not in shown


def test_guesses_tiers_transfers_and_adapters_are_told() -> None:
    stats = WorkerStats(
        drafts_accepted=30,
        drafts_rejected=10,
        tiers={
            "host": TierStats(3 << 20, 640, 40, 50),
            "disk": TierStats(5 << 30, 0, 0, 7, errors=2, up=False),
        },
        transfers={"ok": (4, 1.0), "late": (1, 5.0), "gone": (2, 0.1), "stopped": (9, 0.1)},
    )
    held = [AdapterInfo("sql", DIGEST, 8, 100), AdapterInfo("gone", "sha256:" + "cd" * 32, 8, 100)]
    named = [Adapter(name, model, "a", digest=DIGEST) for name, model in (("sql", "m"), (HOSTILE, "m"), ("x", "other"))]
    made = row(stats, named, role="decode", adapters=held)
    assert made.transfers is not None
    assert made.transfers.failed == 3, "a caller that hung up is no failure"
    shown = page(made)
    for words in (
        "Guesses right 75.0%",
        "Below the device host 3 MiB 640 tokens found 40 blocks brought back 50 saved",
        "and disk 5.0 GiB 0 tokens found 0 blocks brought back 7 saved 2 errors not written to",
        "Prompts from elsewhere 4 came, on average in 250 ms stopped 9 gone 2 late 1",
        f"Adapters {HOSTILE} sql sha256:cdcdcdcdcdcd",
        "decode",
    ):
        assert words in shown, (words, shown)


def test_transfers_that_never_came_have_no_mean() -> None:
    shown = page(row(WorkerStats(transfers={"late": (3, 15.0)})))
    assert "Prompts from elsewhere 0 came late 3" in shown
