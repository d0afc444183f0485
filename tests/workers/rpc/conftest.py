"""Workers' ends that stop with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.rpc.talk import HELLO, SECRET, Serve, Worker

TRANSPORTS = ("unix", "tcp")


@pytest.fixture
async def serve_at(tmp_path: Path) -> AsyncIterator[Serve]:
    """Start one: ``await serve_at("unix" | "tcp", secret=…, ready=…)``."""
    workers: list[Worker] = []

    async def start(scheme: str, secret: str | None = SECRET, *, ready: bool = True) -> Worker:
        folder = tmp_path / f"w{len(workers)}"
        folder.mkdir(mode=0o700)
        worker = Worker(f"unix:{folder}/s" if scheme == "unix" else "127.0.0.1:0", secret)
        workers.append(worker)
        await worker.server.start()
        if ready:
            worker.server.ready(HELLO)
        return worker

    yield start
    for worker in workers:
        await worker.server.stop()
