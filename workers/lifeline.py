"""A worker that a gateway started dies with it, however the gateway ends.

Three ties, each of which is enough: the kernel kills us when the parent dies (Linux), the pipe on standard input ends,
the parent's process id changes. All end the process at once: with its gateway gone nobody reads an answer.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
POLL_S = 0.5


def die_with(parent_pid: int | None, *, stdin: bool, die: Callable[[], None] = lambda: os._exit(1)) -> None:
    """Tie this process to ``parent_pid`` and, with ``stdin``, to the pipe on fd 0. ``die`` must not return."""
    if stdin:
        threading.Thread(target=_watch_pipe, args=(0, die), name="lifeline-pipe", daemon=True).start()
    if parent_pid is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the tie was made
        die()
    threading.Thread(target=_watch_parent, args=(parent_pid, die), name="lifeline-parent", daemon=True).start()


def _watch_pipe(fd: int, die: Callable[[], None]) -> None:
    while True:
        try:
            if not os.read(fd, 4096):
                break
        except OSError:
            break
    die()


def _watch_parent(parent_pid: int, die: Callable[[], None]) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_S)
    die()
