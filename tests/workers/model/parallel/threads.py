"""Ranks as threads of the test's process: as the real ones, without seconds of importing torch."""

from __future__ import annotations

import socket
import subprocess
import threading

import pytest

from workers.model.parallel import ranks
from workers.model.parallel.messages import Channel
from workers.model.parallel.rank import serve


class RankThread:
    """``RankProcess``."""

    def __init__(self, ours: socket.socket) -> None:
        self._code: int | None = None
        self._channel = Channel(ours)
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            serve(self._channel)
            self._code = 0
        except Exception:
            self._code = 1

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        self._channel.close()

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._code is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._code


def spawn(theirs: socket.socket, threads: int) -> RankThread:
    """``ranks.spawn``."""
    return RankThread(theirs.dup())


@pytest.fixture
def ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is loaded on several devices runs in this process alone."""
    monkeypatch.setattr(ranks, "spawn", spawn)
