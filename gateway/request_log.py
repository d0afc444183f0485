"""The request log: one JSON line per request with a verified tenant, in a file of its own, for replay and simulation.

Rules
- Lengths and times, never content, never a user, key or token. ``prefixes`` are keyed digests of the first 1, 2, 4 …
  blocks of the prompt: they tell that two prompts of a tenant begin alike, and nothing of how.
- A line is written when the request is over, in one piece, so that a file that is rotated or copied has whole lines.
- A disk that fails costs lines, never a request: it is logged once and tried again with the next line.
- The file is the gateway's own (mode 0600): who asked when is personal, even without what.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from gateway import log
from policies.types import Job

_log = log.get("request_log")
_encode = msgspec.json.Encoder().encode
_DIGITS = 12


class RequestLog:
    """Appends to one file. Raises OSError at once for a file that cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = self._open()
        self._failed = False

    def write(self, summary: log.RequestSummary, job: Job | None, block_size: int | None) -> None:
        """Append one request's line. Never raises."""
        if summary.tenant is None:
            return
        line = _encode(record(summary, job, block_size, time.time())) + b"\n"
        try:
            if self._file is None:
                self._file = self._open()
            os.write(self._file, line)
            self._failed = False
        except OSError as error:
            self.close()
            if not self._failed:
                self._failed = True
                _log.error("request_log_failed", path=str(self._path), failure=log.describe(error))

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def record(summary: log.RequestSummary, job: Job | None, block_size: int | None, now: float) -> dict[str, Any]:
    """The line's fields. ``now``: Unix time at which the request was over."""
    usage = summary.usage
    fields: dict[str, Any] = {
        "arrival": round(now - summary.duration_s, 6),
        "tenant": summary.tenant,
        "model": summary.model,
        "class": summary.service_class,
        "outcome": summary.outcome,
        "reason": summary.reason,
        "prompt": job.prompt_tokens if job is not None else None,
        "cached": usage.cached,
        "output": usage.output,
        "max_tokens": job.max_tokens if job is not None else None,
        "queue_s": _rounded(summary.queue_wait_s),
        "first_token_s": _rounded(summary.first_token_s),
        "duration_s": _rounded(summary.duration_s),
    }
    if job is not None and job.prefix_keys:
        fields["block_size"] = block_size
        fields["prefixes"] = prefixes(job)
    return {key: value for key, value in fields.items() if value is not None}


def prefixes(job: Job) -> list[str]:
    """Digests of its first 1, 2, 4 … full blocks."""
    found = []
    depth = 1
    while depth <= len(job.prefix_keys):
        found.append(job.prefix_keys[depth - 1].hex()[:_DIGITS])
        depth *= 2
    return found


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
