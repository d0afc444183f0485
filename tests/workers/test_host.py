"""Allocator, cores and OpenMP's variables of a worker process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import checks
from workers import cgroup, host
from workers.config import EngineConfig
from workers.launchers.base import LaunchContext, LaunchError, WorkerSpec
from workers.launchers.local import LocalLauncher
from workers.model.native import build

SHOW = "import sys, os; sys.path.insert(0, os.getcwd()); from workers import host; "


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of jemalloc's name, so that preloading it is real."""
    compiler = build.compiler()
    assert compiler is not None
    (tmp_path / "x.cpp").write_text("int nothing;")
    place = tmp_path / "libjemalloc.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(place), str(tmp_path / "x.cpp")], check=True, timeout=60)
    return place


def test_the_first_that_is_installed_is_preloaded(library: Path) -> None:
    dirs = [str(library.parent)]
    assert host.preload("auto", {}, dirs) == {"LD_PRELOAD": str(library)}
    assert host.preload("jemalloc", {"LD_PRELOAD": "/x.so"}, dirs) == {"LD_PRELOAD": f"{library}:/x.so"}
    assert host.preload("system", {}, dirs) == {}
    (library.parent / "libtcmalloc_minimal.so.4").touch()
    assert host.preload("auto", {}, dirs)["LD_PRELOAD"].endswith("libtcmalloc_minimal.so.4")


@pytest.mark.parametrize("given", ["/usr/lib/libjemalloc.so.2", "/opt/libtcmalloc.so.4:/y.so", "/z/libmimalloc.so"])
def test_an_operators_allocator_stays(given: str, library: Path) -> None:
    assert host.preload("auto", {"LD_PRELOAD": given}, [str(library.parent)]) == {}


def test_without_any_auto_takes_the_systems_and_a_named_one_is_missed(tmp_path: Path) -> None:
    assert host.preload("auto", {}, [str(tmp_path)]) == {}
    with pytest.raises(ValueError, match=r"engine\.allocator=tcmalloc: .* is not installed \(Debian: libtcmalloc-min"):
        host.preload("tcmalloc", {}, [str(tmp_path)])


def test_a_process_knows_its_allocator(library: Path) -> None:
    for env, expected in (({"LD_PRELOAD": str(library)}, "jemalloc"), ({}, "system")):
        done = subprocess.run(
            [sys.executable, "-c", SHOW + "print(host.loaded_allocator())"],
            env={**{k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == expected


async def test_the_launcher_preloads_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LIBRARY_DIRS", (str(library.parent),))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    spec = WorkerSpec("w", 0, "m", "source", engine=EngineConfig(allocator="jemalloc"))
    worker = await LocalLauncher(LaunchContext(), (sys.executable, "-c", "import time; time.sleep(60)")).start(spec)
    try:
        assert f"LD_PRELOAD={library}".encode() in Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
    finally:
        await worker.stop(0)
    spec = WorkerSpec("w", 0, "m", "source", engine=EngineConfig(allocator="tcmalloc"))
    with pytest.raises(LaunchError, match=r"engine\.allocator=tcmalloc"):
        await LocalLauncher(LaunchContext()).start(spec)


@pytest.mark.parametrize(
    ("text", "cores"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("5,5-6", {5, 6}), ("12-12", {12})]
)
def test_cores_as_text(text: str, cores: set[int]) -> None:
    assert host.parse_cores(text) == cores
    assert host.parse_cores(host._text(cores)) == cores


def test_a_worker_is_bound_before_anything_starts() -> None:
    core = str(min(os.sched_getaffinity(0)))
    code = (
        f"from workers.config import EngineConfig; chosen = host.settle(EngineConfig(cores='{core}')); "
        "print(chosen['cores'], chosen['threads'], os.environ['OMP_NUM_THREADS'], os.environ['OMP_PROC_BIND'], "
        "sorted(os.sched_getaffinity(0)), 'torch' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW + code], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"{core} None 1 close [{core}] False"


def test_variables_that_are_set_stay() -> None:
    env = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    chosen = host.settle(EngineConfig(threads=2), env)
    assert env == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    assert chosen["omp_num_threads"] == "7"


@pytest.mark.parametrize(("allowed", "threads"), [(float("inf"), 3), (2.9, 2), (0.5, 1), (64.0, 3)])
def test_no_more_threads_than_the_control_group_has_time_for(
    allowed: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_cores", lambda: {0, 1, 2})
    monkeypatch.setattr(cgroup, "cores", lambda: allowed)
    env: dict[str, str] = {}
    assert host.settle(EngineConfig(), env)["omp_num_threads"] == str(threads)
    assert host.settle(EngineConfig(threads=5), {})["omp_num_threads"] == "5"


@pytest.mark.parametrize(
    ("cores", "why"), [("4-2", "4-2 runs backwards; write 2-4"), ("99999", "core 99999 is not there for this process")]
)
def test_wrong_cores_are_named(cores: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        host.settle(EngineConfig(cores=cores), {})


@pytest.mark.parametrize("cores", ["", "a", "1-", "-1", "1,,2", "0-3;4", "123456"])
def test_what_is_no_list_of_cores_is_refused_by_the_configuration(cores: str) -> None:
    with pytest.raises(ValueError, match="cores"):
        EngineConfig(cores=cores)


def test_doctor_names_the_allocator(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LIBRARY_DIRS", (str(library.parent),))
    [found] = checks.allocator()
    assert (found.status, found.detail) == ("ok", f"jemalloc ({library}), preloaded into local workers")
    library.unlink()
    [found] = checks.allocator()
    assert found.status == "note"
