"""How long a thread of the worker may keep the interpreter while another waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.arch.source import ROOT
from workers.main import SWITCH_S

PROGRAM = """
import sys
before = sys.getswitchinterval()
from workers.main import main
code = main(sys.argv[1:])
print(before, sys.getswitchinterval(), code)
"""


def test_the_worker_process_hands_over_sooner(tmp_path: Path) -> None:
    """The engine's thread would else wait 5 ms for the one that writes its outputs, in every step."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--source", str(tmp_path / "missing"), "--listen", f"unix:{tmp_path}/w.sock"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    before, during, code = done.stdout.splitlines()[-1].split()
    assert code == "1", "no such model: it ran as far as that"
    assert float(during) < float(before)
    assert abs(float(during) - SWITCH_S) < 1e-6
