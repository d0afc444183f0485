"""Limits of control groups, in both versions' files."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from workers import cgroup


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({}, "0::/", inf),
        ({"cpu.max": "max 100000"}, "0::/", inf),
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, "0::/a/b", 2.0),
        ({"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 1.0),
        ({"a/cpu.max": "100000 100000"}, "0::/b", inf),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/", inf),
        ({"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/a", 0.5),
        ({"cpu.max": "nonsense"}, "nonsense", inf),
    ],
)
def test_time_of_cores(tmp_path: Path, files: dict[str, str], own: str, cores: float) -> None:
    write(tmp_path, {**files, "own": own})
    assert cgroup.cores(tmp_path, tmp_path / "own") == cores


@pytest.mark.parametrize(
    ("files", "own", "left"),
    [
        ({}, "0::/", cgroup.NO_LIMIT),
        ({"memory.max": "max", "memory.current": "5"}, "0::/", cgroup.NO_LIMIT),
        ({"memory.max": "12", "memory.current": "5"}, "0::/", 7),
        ({"memory.max": "12", "memory.current": "11", "memory.stat": "anon 4\ninactive_file 6"}, "0::/", 7),
        ({"memory.max": "12", "memory.current": "20"}, "0::/", 0),
        ({"memory.max": "99", "memory.current": "9", "a/memory.max": "12", "a/memory.current": "5"}, "0::/a", 7),
        (
            {
                "memory/memory.limit_in_bytes": "12",
                "memory/memory.usage_in_bytes": "11",
                "memory/memory.stat": "inactive_file 1\nhierarchical_memory_limit 12\ntotal_inactive_file 6",
            },
            "4:memory:/",
            7,
        ),
        ({"memory/a/memory.limit_in_bytes": "12", "memory/a/memory.usage_in_bytes": "5"}, "4:memory:/a", 7),
        (
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "5"},
            "4:memory:/",
            cgroup.NO_LIMIT,
        ),
    ],
)
def test_memory_that_is_left(tmp_path: Path, files: dict[str, str], own: str, left: int) -> None:
    write(tmp_path, {**files, "own": own})
    assert cgroup.memory(tmp_path, tmp_path / "own") == left


def test_of_this_process_they_can_be_read() -> None:
    assert cgroup.cores() > 0
    assert cgroup.memory() > 2**20
