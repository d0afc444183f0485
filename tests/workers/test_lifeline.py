"""A gateway that dies takes its workers along, even when nobody could tell them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(60)

GATEWAY = """
import asyncio, sys
from workers.launchers.base import LaunchContext, WorkerSpec
from workers.protocol import Hello
from workers.rpc import WorkerClient
from workers.testing import echo_launcher

async def main():
    worker = await echo_launcher().start(WorkerSpec("w", 0, "m", "echo"))
    client = WorkerClient(worker.address, worker.secret)
    await client.connect()
    await client.listen(lambda message: print(message.pid, flush=True) if isinstance(message, Hello) else None)

asyncio.run(main())
"""

TIED = """
import sys, time
from workers.lifeline import die_with
parent = {parent}
die_with(parent, stdin={stdin})
print("tied", flush=True)
time.sleep(600)
"""

HOLDER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin={stdin})
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Soon; by itself it would stay for ten minutes."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as status:
                if status.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_sigkill_of_the_gateway_ends_its_worker() -> None:
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    pid = int(gateway.stdout.readline())
    os.kill(pid, 0)
    gateway.kill()
    gateway.wait()
    gateway.stdout.close()
    assert gone(pid)


@pytest.mark.parametrize("tie", ["pipe", "parent"])
def test_each_tie_is_enough(tie: str) -> None:
    code = TIED.format(parent="__import__('os').getppid()" if tie == "parent" else None, stdin=tie == "pipe")
    holder = HOLDER.format(stdin="subprocess.PIPE" if tie == "pipe" else "subprocess.DEVNULL")
    parent = subprocess.Popen([sys.executable, "-c", holder, code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
    assert "tied" in lines
    [pid] = [int(line) for line in lines if line != "tied"]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


def test_a_child_whose_parent_died_before_the_tie_ends_at_once() -> None:
    code = "import os; from workers.lifeline import die_with; die_with(os.getppid() + 1, stdin=False); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
