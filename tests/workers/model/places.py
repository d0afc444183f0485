"""Backends and the devices they are tested on."""

from __future__ import annotations

from typing import Any

import pytest


def places(*names: str) -> list[Any]:
    """(backend, device): each on the CPU, and for ``make test-gpu`` on CUDA, together with what runs only there."""
    cuda = [*(name for name in names if name != "native"), "triton"]
    here = [pytest.param(name, "cpu", id=name) for name in names]
    return here + [pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in cuda]
