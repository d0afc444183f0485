"""A ledger on a disk that is really full, and in a file that really cannot grow: 503 for new work, and no lost row.

Each in a process of its own. A small tmpfs needs a mount namespace, which not every machine grants: where it does not,
the size limit of files (another error of the same write) is what is tried.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import ROOT

CHILD = """
import asyncio, contextlib, json, os, resource, sys
from pathlib import Path
from policies.quota.ledger import LedgerQuota
from policies.spi import PolicyUnavailableError
from policies.testing import make_job
from policies.types import Charge, JobId, UsageQuery

folder, kind = Path(sys.argv[1]), sys.argv[2]
filler = folder / "filler"

def fill():
    if kind == "tmpfs":
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
    else:
        largest = max(path.stat().st_size for path in folder.glob("ledger.db*"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))

def free():
    if kind == "tmpfs":
        filler.unlink()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

async def admitted(quota, name):
    try:
        return (await quota.reserve(make_job(name), 0.0)).admitted
    except PolicyUnavailableError as error:
        return error.retry_after_s

async def main():
    quota = LedgerQuota(folder / "ledger.db")
    await quota.start()
    told = {"before": [await admitted(quota, f"run{i}") for i in range(40)]}
    fill()
    told["full"] = [await admitted(quota, f"new{i}") for i in range(200)]
    figures = [await quota.settle(JobId(f"run{i}"), Charge(5, 0, 2), 0.0) for i in range(40)]
    told["stored"] = [one["stored"] for one in figures]
    told["still"] = [await admitted(quota, f"more{i}") for i in range(20)]
    told["writable"] = quota.writable()
    free()
    while not isinstance(now := await admitted(quota, "after"), bool):
        await asyncio.sleep(0.05)
    told["after"] = now
    new = [i for i, answer in enumerate(told["full"]) if answer is True]
    for name in ["after", *(f"new{i}" for i in new)]:
        await quota.settle(JobId(name), Charge(5, 0, 2), 0.0)
    (total,) = await quota.usage(UsageQuery("2000-01-01", "9999-01-01", ("tenant",)))
    told["total"] = [total.requests, total.prompt, total.output]
    await quota.close()
    print(json.dumps(told))

asyncio.run(main())
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def _mounts() -> bool:
    """Whether a small tmpfs can be had."""
    if shutil.which("unshare") is None:
        return False
    tried = [*NAMESPACE, "sh", "-c", "mount -t tmpfs -o size=4m none /tmp"]
    return subprocess.run(tried, capture_output=True, timeout=60).returncode == 0


KINDS = ["tmpfs", "file size"] if _mounts() else ["file size"]


@pytest.mark.parametrize("kind", KINDS)
def test_new_work_is_refused_what_ran_is_written_and_it_goes_on(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), kind]
    if kind == "tmpfs":
        mount = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
        command = [*NAMESPACE, "sh", "-c", mount, str(tmp_path), *command]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    assert told["before"] == [True] * 40
    refused = [answer for answer in told["full"] if answer is not True]
    assert refused
    assert told["full"][-1] is not True, "what is full stays full"
    assert all(wait >= 1 for wait in refused), "with a Retry-After"
    assert not told["writable"]
    assert True not in told["still"], "the space that the ballast gave up is for what has run"
    if kind == "tmpfs":
        assert all(told["stored"]), "the ballast holds what ran"
    assert told["after"] is True
    ran = 40 + 1 + len(told["full"]) - len(refused)
    assert told["total"] == [ran, 5 * ran, 2 * ran]
