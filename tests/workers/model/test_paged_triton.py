"""Our Triton kernel in Triton's interpreter, which wants its variable before the import: so in a child process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workers.model.attention import AttentionShape, choose


def test_the_kernel_in_the_interpreter() -> None:
    suite = Path(__file__).with_name("interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(suite)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 20


def test_without_a_gpu_or_the_interpreter_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.attention=triton cannot be used \(triton: device cpu"):
        choose("triton", AttentionShape(4, 2, 16), torch.device("cpu"))
