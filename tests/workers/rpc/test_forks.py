"""Processes are started beside threads that are inside gRPC."""

from __future__ import annotations

import subprocess
import sys

from tests.arch.source import ROOT

BUSY = """
import os, threading, time
import workers.rpc
import grpc

channel = grpc.insecure_channel("127.0.0.1:1")

def call():
    try:
        channel.unary_unary("/a/b")(b"", timeout=1.0, wait_for_ready=True)
    except grpc.RpcError:
        pass

callers = [threading.Thread(target=call) for _ in range(3)]
for caller in callers:
    caller.start()
time.sleep(0.3)
for _ in range(10):
    child = os.fork()
    if not child:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for caller in callers:
    caller.join()
"""


def test_grpc_takes_no_part_in_a_fork() -> None:
    """Its handlers would say that they are skipped: other threads are in calls."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
